"""AdamW with averages in 8 bits, against torchao's own optimizer and against fp32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torchao.optim
from torch import Tensor, nn

from spider_titan.distributed import CommConfig, ParallelismConfig, join_world
from spider_titan.optim import GroupedAdamW, LRSchedulerConfig, OptimizerConfig
from spider_titan.optim.shards import local
from spider_titan.plugins import PluginContext, after_step, apply_plugins, materialize
from spider_titan.plugins.precision import PrecisionConfig
from spider_titan.spec import Batch, ParamGroup, StepContext, get_model_spec

EIGHT_BIT = OptimizerConfig(name="adamw8bit", lr=0.01)
SCHEDULE = LRSchedulerConfig(warmup_steps=3)
SHAPES = {"matrix": (20, 256), "wide": (6, 768), "experts": (2, 8, 512), "narrow": (64, 64), "small": (4, 256)}
QUANTISED = ("matrix", "wide", "experts")
CODES = {"step", "exp_avg_codes", "exp_avg_scale", "exp_avg_sq_codes", "exp_avg_sq_scale"}
FLOATS = {"step", "exp_avg", "exp_avg_sq"}


@contextmanager
def without_compiling() -> Iterator[None]:
    """The same arithmetic op by op: compiling it takes longer than all of these tests."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture
def eager() -> Iterator[None]:
    with without_compiling():
        yield


def make_parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def make_optimizer(parameters: dict[str, nn.Parameter], config: OptimizerConfig = EIGHT_BIT) -> GroupedAdamW:
    """Two groups, one of which decays; a tensor of either kind in both."""
    decays = {name: p for name, p in parameters.items() if name in ("matrix", "experts", "narrow")}
    rest = {name: p for name, p in parameters.items() if name not in decays}
    groups = [ParamGroup("decays", decays), ParamGroup("rest", rest, lr_factor=0.5, weight_decay=False)]
    return GroupedAdamW(groups, config, SCHEDULE, 10, torch.clone)


def set_gradients(parameters: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.usefixtures("eager")
def test_steps_are_those_of_torchao() -> None:
    parameters, others = make_parameters(), make_parameters()
    optimizer = make_optimizer(parameters)
    reference = torchao.optim.AdamW8bit(
        [
            {"params": [others["matrix"], others["experts"]], "lr": torch.zeros(()), "weight_decay": 0.1},
            {"params": [others["wide"]], "lr": torch.zeros(()), "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    for step in range(4):
        for tensors in (parameters, others):
            set_gradients(tensors, step)
        optimizer.step(step)
        for group, factor in zip(reference.param_groups, (1.0, 0.5), strict=True):
            group["lr"].fill_(optimizer.lr(step) * factor)
        reference.step()
    state = optimizer.state_tensors()
    for name in QUANTISED:
        assert torch.equal(parameters[name], others[name]), name
        for key in ("exp_avg", "exp_avg_sq"):
            average = reference.state[others[name]][key]
            assert torch.equal(state[f"{name}.{key}_codes"], average.codes)
            assert torch.equal(state[f"{name}.{key}_scale"].flatten(), average.scale)


@pytest.mark.slow
def test_compiled_it_does_the_same() -> None:
    """One kernel for all shapes; fused operations may move a value to the next code, and no further."""
    compiled, plain = make_parameters(), make_parameters()
    optimizers = make_optimizer(compiled), make_optimizer(plain)
    for step in range(3):
        set_gradients(compiled, step)
        set_gradients(plain, step)
        optimizers[0].step(step)
        with without_compiling():
            optimizers[1].step(step)
    for name in SHAPES:
        torch.testing.assert_close(compiled[name], plain[name], rtol=1e-3, atol=1e-4)
    first, second = (optimizer.state_tensors() for optimizer in optimizers)
    for name in QUANTISED:
        for key in ("exp_avg_codes", "exp_avg_sq_codes"):
            apart = (first[f"{name}.{key}"].int() - second[f"{name}.{key}"].int()).abs()
            assert int(apart.max()) <= 1 and float((apart > 0).float().mean()) < 0.01


@pytest.mark.usefixtures("eager")
def test_only_matrices_of_whole_blocks_are_quantised_and_all_state_is_plain() -> None:
    parameters = make_parameters()
    optimizer = make_optimizer(parameters)
    set_gradients(parameters, 0)
    optimizer.step(0)
    keys: dict[str, set[str]] = {}
    for full_name, value in optimizer.state_tensors().items():
        name, _, key = full_name.rpartition(".")
        keys.setdefault(name, set()).add(key)
        assert type(value) is Tensor
        if key.endswith("_codes"):
            assert value.dtype == torch.uint8 and value.shape == SHAPES[name]
        if key.endswith("_scale"):
            assert value.dtype == torch.float32 and value.shape == (*SHAPES[name][:-1], SHAPES[name][-1] // 256)
    assert keys == {name: CODES if name in QUANTISED else FLOATS for name in SHAPES}
    sizes = {name: value.numel() * value.element_size() for name, value in optimizer.state_tensors().items()}
    assert optimizer.state_bytes() == sum(sizes.values())
    of_matrix = sum(size for name, size in sizes.items() if name.startswith("matrix."))
    assert of_matrix == 20 * 256 * 2 + 20 * 2 * 4 + 4


@pytest.mark.usefixtures("eager")
def test_it_stays_near_fp32_averages() -> None:
    parameters, exact = make_parameters(), make_parameters()
    initial = {name: value.detach().clone() for name, value in parameters.items()}
    optimizers = make_optimizer(parameters), make_optimizer(exact, OptimizerConfig(lr=0.01))
    for step in range(5):
        for tensors, optimizer in zip((parameters, exact), optimizers, strict=True):
            set_gradients(tensors, step)
            optimizer.step(step)
    for name in SHAPES:
        moved, expected = parameters[name].detach() - initial[name], exact[name].detach() - initial[name]
        error = float((moved - expected).norm() / expected.norm())
        assert 0 < error < 0.05 if name in QUANTISED else error == 0, name


@pytest.mark.usefixtures("eager")
def test_restored_state_goes_on_to_the_last_bit() -> None:
    whole = make_parameters()
    optimizer = make_optimizer(whole)
    for step in range(2):
        set_gradients(whole, step)
        optimizer.step(step)
    weights = {name: nn.Parameter(value.detach().clone()) for name, value in whole.items()}
    saved = {name: value.clone() for name, value in optimizer.state_tensors().items()}
    restored = make_optimizer(weights)
    for name, value in restored.allocate_state(saved).items():
        value.copy_(saved[name])
    for step in range(2, 5):
        for tensors, each in ((whole, optimizer), (weights, restored)):
            set_gradients(tensors, step)
            each.step(step)
    for name in SHAPES:
        assert torch.equal(whole[name], weights[name]), name
    for name, value in optimizer.state_tensors().items():
        assert torch.equal(restored.state_tensors()[name], value), name


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("saved_by", ["adamw", "adamw8bit"])
def test_state_of_the_other_optimizer_is_refused(saved_by: str) -> None:
    parameters = make_parameters()
    configs = {"adamw": OptimizerConfig(), "adamw8bit": EIGHT_BIT}
    first = make_optimizer(parameters, configs.pop(saved_by))
    set_gradients(parameters, 0)
    first.step(0)
    ((name, config),) = configs.items()
    with pytest.raises(
        ValueError, match=rf'optimizer\.name = "{name}" keeps .* for \w+, but the saved state has exp_avg.*; go on with'
    ):
        make_optimizer(parameters, config).allocate_state(first.state_tensors())


@pytest.mark.parametrize(("config", "bytes_a_parameter"), [(OptimizerConfig(), 8.0), (EIGHT_BIT, 3.1952)])
def test_the_reference_models_state_without_its_memory(config: OptimizerConfig, bytes_a_parameter: float) -> None:
    """Four fifths of it are matrices of whole blocks; tables and small sizes stay in fp32."""
    spec = get_model_spec("spider")
    model = spec.build(spec.flavors["10b"], device="meta")
    groups = spec.param_groups(model)
    optimizer = GroupedAdamW(groups, config, SCHEDULE, 10, torch.clone)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert optimizer.state_bytes() / count == pytest.approx(bytes_a_parameter, abs=1e-3)
    in_8_bits = sum(
        p.numel() for p in model.parameters() if p.ndim > 1 and p.shape[-1] % 256 == 0 and p.numel() >= 4096
    )
    expected = f", averages of {in_8_bits:,} of {count:,} parameters in 8 bits" if config is EIGHT_BIT else ""
    assert optimizer.summary() == f"{config.name}{expected}; rows of 2 tables move when hit"


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("offload", [False, True], ids=["", "offload"])
def test_weights_that_are_gathered_as_float8_have_plain_state_too(offload: bool) -> None:
    """torchao wraps their shards, and its 8-bit state would be wrapped as well."""
    spec, parallelism = get_model_spec("byte_transformer"), ParallelismConfig(enable_cpu_offload=offload)
    config = spec.config_class(
        hidden_size=256,
        num_heads=2,
        num_layers=1,
        intermediate_size=256,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
    )
    precision = PrecisionConfig(mode="fp8_dynamic", fp8_recipe="tensorwise", fp8_all_gather=True, emulate=True)
    ids = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    losses = []
    with join_world(parallelism, CommConfig()) as world:
        context = PluginContext(world.mesh, precision=precision, parallelism=parallelism)
        model = apply_plugins(spec.build(config, device="meta"), spec, context)
        materialize(model, context, world.device)
        spec.init_weights(model, 3)
        optimizer = GroupedAdamW(spec.param_groups(model), EIGHT_BIT, SCHEDULE, 10, world.sum_over_shards)
        for step in range(3):
            total = spec.loss(model, batch, StepContext(batch.num_targets)).total
            total.backward()
            optimizer.clip(1.0)
            optimizer.step(step)
            optimizer.zero_grad()
            after_step(model, context)
            losses.append(float(total.detach()))
    state = {name: local(value) for name, value in optimizer.state_tensors().items()}
    assert "layers.0.mlp.up_proj.weight.exp_avg_codes" in state
    assert {type(value) for value in state.values()} == {Tensor}
    assert optimizer.state_bytes() == sum(value.numel() * value.element_size() for value in state.values())
    assert losses == sorted(losses, reverse=True)
