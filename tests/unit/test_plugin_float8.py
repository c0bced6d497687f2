"""float8 linears against plain arithmetic, and which linears they are."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchao.float8.float8_linear import Float8Linear

from spider_titan.distributed import CommConfig, ParallelismConfig, World, imagine_world, join_world
from spider_titan.models.common.init import copy_full_
from spider_titan.plugins import PluginContext, after_step, apply_plugins, materialize, quantize
from spider_titan.plugins.precision import PrecisionConfig
from spider_titan.spec import Batch, ModelSpec, StepContext, get_model_spec

SPIDER, BYTE_TRANSFORMER = get_model_spec("spider"), get_model_spec("byte_transformer")
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
SMALL_SPIDER: dict[str, Any] = {
    **SMALL,
    "num_prelude_layers": 1,
    "num_coda_layers": 1,
    "num_recurrent_layers": 2,
    "engram_layers": (1,),
    "num_experts": 4,
    "expert_rank": 8,
    "engram_slots": 64,
    "engram_head_dim": 8,
    "lora_rank": 16,
}
DENSE_LINEARS = (
    "attention.q_down",
    "attention.q_up",
    "attention.kv_down",
    "attention.kv_up",
    "attention.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
RECURRENT_LINEARS = (*DENSE_LINEARS[:5], "moe.up_proj", "moe.down_proj")
CONTEXT = StepContext(num_targets=4 * 40, boundary_mode="topk", boundary_phase="fixed", max_boundary_rate=0.34)


@pytest.fixture
def world() -> Iterator[World]:
    with join_world(ParallelismConfig(), CommConfig()) as world:
        yield world


def fp8(**changes: Any) -> PrecisionConfig:
    return PrecisionConfig(**{"mode": "fp8_dynamic", "emulate": True, **changes})


def convert(world: World, spec: ModelSpec, config: Any, precision: PrecisionConfig) -> nn.Module:
    """A model on the meta device after this plugin alone."""
    return quantize.apply(spec.build(config, device="meta"), spec, PluginContext(world.mesh, precision=precision))


def build(world: World, spec: ModelSpec, config: Any, precision: PrecisionConfig) -> nn.Module:
    """A model as the trainer builds it."""
    context = PluginContext(world.mesh, precision=precision)
    model = apply_plugins(spec.build(config, device="meta"), spec, context)
    materialize(model, context, world.device)
    spec.init_weights(model, 3)
    return model


def float8_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}


def dense_names(stack: str, num_layers: int) -> set[str]:
    return {f"{stack}.{index}.{name}" for index in range(num_layers) for name in DENSE_LINEARS}


def spider_names(num_outer: int, num_recurrent: int) -> set[str]:
    core = {f"core.layers.{index}.{name}" for index in range(num_recurrent) for name in RECURRENT_LINEARS}
    return core | dense_names("prelude", num_outer) | dense_names("coda", num_outer)


def make_batch() -> Batch:
    ids = torch.randint(0, 256, (4, 41), generator=torch.Generator().manual_seed(1))
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def test_the_linears_of_blocks_are_converted_and_no_others(world: World) -> None:
    model = convert(world, SPIDER, SPIDER.flavors["debug"], fp8())
    assert float8_names(model) == spider_names(2, 6)
    model = convert(world, BYTE_TRANSFORMER, BYTE_TRANSFORMER.flavors["debug"], fp8())
    assert float8_names(model) == dense_names("layers", 7)


def test_what_is_never_quantised_stays_though_its_sizes_would_fit(world: World) -> None:
    model = convert(world, SPIDER, SPIDER.config_class(**SMALL_SPIDER), fp8())
    assert float8_names(model) == spider_names(1, 2)
    kept = {name: (m.in_features, m.out_features) for name, m in model.named_modules() if type(m) is nn.Linear}
    assert kept == {
        "boundary_predictor.hidden": (32, 32),
        "boundary_predictor.output": (32, 1),
        "engram.layers.1.key_proj": (48, 32),
        "engram.layers.1.value_proj": (48, 32),
        "core.adapter.down_proj": (32, 16),
        "core.adapter.up_proj": (16, 32),
        "core.halt_predictor": (32, 1),
        "out_proj": (32, 32),
        "lm_head": (32, 272),
    }


def test_odd_sizes_are_left_and_listed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spider_titan")
    config = BYTE_TRANSFORMER.config_class(**{**SMALL, "qk_rope_head_dim": 8, "num_layers": 3})
    model = convert(world, BYTE_TRANSFORMER, config, fp8())
    assert float8_names(model) == {name for name in dense_names("layers", 3) if not name.endswith("kv_down")}
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warning == (
        "float8: kept out for sizes that are not multiples of 16: layers.*.attention.kv_down x3, 32 -> 24"
    )
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert lines[0] == (
        "float8: 21 of 25 linears compute in float8, rowwise scales, emulated; the others stay in high precision"
    )
    assert len(lines) == 8 and "float8: layers.*.attention.q_up x3, 16 -> 48" in lines


def test_skipped_by_pattern(world: World) -> None:
    config = BYTE_TRANSFORMER.config_class(**SMALL, num_layers=2)
    model = convert(world, BYTE_TRANSFORMER, config, fp8(skip=("layers.0.*", "*.q_up", "lm_head")))
    assert float8_names(model) == {f"layers.1.{name}" for name in DENSE_LINEARS} - {"layers.1.attention.q_up"}


def test_patterns_that_match_nothing_are_errors(world: World) -> None:
    config = BYTE_TRANSFORMER.config_class(**SMALL, num_layers=1)
    with pytest.raises(ValueError, match=r"precision\.skip: the pattern 'layers\.1\.\*' matches no linear"):
        convert(world, BYTE_TRANSFORMER, config, fp8(skip=("*.q_up", "layers.1.*")))
    with pytest.raises(ValueError, match=r"finds no linear to convert.*0 are left by precision\.skip"):
        convert(world, BYTE_TRANSFORMER, config, fp8(skip=("layers.*",)))

    def outdated(model: nn.Module) -> list[Any]:
        return [
            dataclasses.replace(block, high_precision=("layers.0.gone",)) for block in BYTE_TRANSFORMER.blocks(model)
        ]

    with pytest.raises(ValueError, match=r"high_precision of block 'layers\.0' of the model spec: .*'layers\.0\.gone'"):
        convert(world, dataclasses.replace(BYTE_TRANSFORMER, blocks=outdated), config, fp8())


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ValueError, match=r'fp8_all_gather = true does not go with fp8_recipe = "rowwise".*tensorwise'):
        PrecisionConfig(mode="fp8_dynamic", fp8_all_gather=True)


def test_settings_without_use_are_named(world: World, caplog: pytest.LogCaptureFixture) -> None:
    precision = PrecisionConfig(mode="bf16", fp8_recipe="tensorwise", emulate=True)
    model = convert(world, BYTE_TRANSFORMER, BYTE_TRANSFORMER.config_class(**SMALL), precision)
    assert float8_names(model) == set()
    assert [record.getMessage() for record in caplog.records] == [
        'precision: not used with precision.mode = "bf16": fp8_recipe, emulate'
    ]
    caplog.clear()
    convert(world, BYTE_TRANSFORMER, BYTE_TRANSFORMER.config_class(**SMALL), PrecisionConfig(mode="bf16"))
    assert not caplog.records


def test_a_dry_run_asks_for_no_device() -> None:
    with imagine_world(ParallelismConfig(), 64) as world:
        precision = PrecisionConfig(mode="fp8_dynamic", fp8_recipe="tensorwise", fp8_all_gather=True)
        model = convert(world, SPIDER, SPIDER.flavors["debug"], precision)
    assert float8_names(model) == spider_names(2, 6)


def test_shards_of_different_sizes_are_gathered_in_bf16(caplog: pytest.LogCaptureFixture) -> None:
    config = BYTE_TRANSFORMER.config_class(**{**SMALL, "intermediate_size": 48}, num_layers=2)
    with imagine_world(ParallelismConfig(), 3) as world:
        model = convert(world, BYTE_TRANSFORMER, config, fp8(fp8_recipe="tensorwise", fp8_all_gather=True))
    assert float8_names(model) == dense_names("layers", 2)
    gathered = {name for name, parameter in model.named_parameters() if hasattr(parameter, "fsdp_pre_all_gather")}
    assert gathered == {f"layers.{index}.mlp.{name}.weight" for index in range(2) for name in ("gate_proj", "up_proj")}
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith("float8: gathered in bf16 because the ranks do not divide their outputs: ")
    assert warning.count("; ") == 5 and "layers.*.attention.q_down x2, 32 -> 16; " in warning


def quantise(x: Tensor, recipe: str, dim: int, dtype: torch.dtype) -> Tensor:
    """Rounds to float8 and back: one scale for each vector along ``dim``, a power of 2, or one for the whole tensor."""
    largest = torch.finfo(dtype).max
    if recipe == "tensorwise":
        scale = largest / x.float().abs().max().clamp(min=1e-12)
    else:
        exponent = (largest / x.float().abs().amax(dim, keepdim=True).clamp(min=1e-12)).log2().floor()
        scale = torch.ldexp(torch.ones_like(exponent), exponent.int())
    return (x.float() * scale).clamp(-largest, largest).to(dtype).float() / scale


def one_linear(world: World, recipe: str) -> nn.Linear:
    """A converted linear, 32 -> 64, with bf16 weights."""
    config = BYTE_TRANSFORMER.config_class(**{**SMALL, "intermediate_size": 64}, num_layers=1)
    model = convert(world, BYTE_TRANSFORMER, config, fp8(fp8_recipe=recipe))
    linear = model.get_submodule("layers.0.mlp.up_proj").to_empty(device="cpu").to(torch.bfloat16)
    with torch.no_grad():
        linear.weight.normal_(generator=torch.Generator().manual_seed(0))
    return linear


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_a_linear_equals_plain_arithmetic(world: World, recipe: str) -> None:
    linear = one_linear(world, recipe)
    generator = torch.Generator().manual_seed(1)
    # Rows of very different size, and a number of them that no float8 product takes without padding.
    x = torch.randn(3, 7, 32, generator=generator) * torch.logspace(-3, 3, 7)[:, None]
    grad = torch.randn(3, 7, 64, generator=generator) * torch.logspace(2, -6, 7)[:, None]
    x, grad = x.bfloat16().requires_grad_(), grad.bfloat16()
    out = linear(x)
    out.backward(grad)
    x_ND, grad_NM, weight_MD = x.detach().flatten(0, 1), grad.flatten(0, 1), linear.weight.detach()
    e4m3 = torch.float8_e4m3fn
    grad_type = e4m3 if recipe == "rowwise" else torch.float8_e5m2
    # Each product is scaled along the dim that it sums over.
    expected = quantise(x_ND, recipe, 1, e4m3) @ quantise(weight_MD, recipe, 1, e4m3).T
    expected_x = quantise(grad_NM, recipe, 1, grad_type) @ quantise(weight_MD, recipe, 0, e4m3)
    expected_weight = quantise(grad_NM, recipe, 0, grad_type).T @ quantise(x_ND, recipe, 0, e4m3)
    assert out.dtype == x.grad.dtype == linear.weight.grad.dtype == torch.bfloat16
    # What is left is one rounding to bf16, of sums in another order.
    torch.testing.assert_close(out.detach().flatten(0, 1).float(), expected, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(x.grad.flatten(0, 1).float(), expected_x, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(linear.weight.grad.float(), expected_weight, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_the_error_is_that_of_three_bits(world: World, recipe: str) -> None:
    linear = one_linear(world, recipe)
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = x.double() @ linear.weight.detach().double().T
    error = float((linear(x).detach().double() - exact).norm() / exact.norm())
    # A value is off by up to 2**-4 of itself, 2.5% in the root mean square. Both factors are; a sum keeps the ratio.
    assert 0.03 < error < 0.045


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_zeros_give_finite_values(world: World, recipe: str) -> None:
    linear = one_linear(world, recipe)
    for x, grad in (
        (torch.zeros(16, 32), torch.zeros(16, 64)),
        (torch.cat((torch.zeros(8, 32), torch.ones(8, 32))), torch.cat((torch.ones(8, 64), torch.zeros(8, 64)))),
    ):
        x = x.bfloat16().requires_grad_()
        linear.weight.grad = None
        out = linear(x)
        out.backward(grad.bfloat16())
        zero_rows, zero_grads = (x == 0).all(-1), (grad == 0).all(-1)
        assert out.isfinite().all() and (out[zero_rows] == 0).all()
        assert x.grad.isfinite().all() and (x.grad[zero_grads] == 0).all()
        assert linear.weight.grad.isfinite().all()


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


@pytest.mark.parametrize("spec", [SPIDER, BYTE_TRANSFORMER], ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    "changes", [{}, {"fp8_recipe": "tensorwise", "fp8_all_gather": True}], ids=["rowwise", "gather"]
)
def test_names_and_initial_weights_are_those_of_fp32(world: World, spec: ModelSpec, changes: dict[str, Any]) -> None:
    config = spec.config_class(**(SMALL_SPIDER if spec is SPIDER else SMALL))
    expected = build(world, spec, config, PrecisionConfig()).state_dict()
    state = build(world, spec, config, fp8(**changes)).state_dict()
    assert list(state) == list(expected)
    for name, value in state.items():
        assert value.dtype == expected[name].dtype and torch.equal(full(value), full(expected[name])), name


def loss_and_gradients(model: nn.Module, spec: ModelSpec) -> tuple[float, dict[str, Tensor]]:
    terms = spec.loss(model, make_batch(), CONTEXT)
    terms.total.backward()
    grads = {name: full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return float(terms.total.detach()), grads


@pytest.mark.parametrize("num_loops", [1, 4])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_loops_stay_near_bf16(world: World, num_loops: int, recipe: str) -> None:
    found = []
    for precision in (PrecisionConfig(mode="bf16"), fp8(fp8_recipe=recipe)):
        model = build(world, SPIDER, SPIDER.config_class(**SMALL_SPIDER, num_loops=num_loops), precision)
        # At first the core's output is multiplied by 0.
        out_proj = model.get_parameter("out_proj.weight")
        copy_full_(out_proj, torch.randn(out_proj.shape, generator=torch.Generator().manual_seed(0)))
        found.append(loss_and_gradients(model, SPIDER))
    (reference, expected), (loss, grads) = found
    assert loss == pytest.approx(reference, rel=1e-2) and loss != reference
    assert grads.keys() == expected.keys()
    for name in spider_names(1, 2):
        one, other = grads[f"{name}.weight"].flatten(), expected[f"{name}.weight"].flatten()
        assert torch.dot(one, other) > 0.9 * one.norm() * other.norm() > 0, name


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_training_lowers_the_loss(world: World, recipe: str) -> None:
    precision = fp8(fp8_recipe=recipe, fp8_all_gather=recipe == "tensorwise")
    model = build(world, SPIDER, SPIDER.config_class(**SMALL_SPIDER), precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        losses.append(loss_and_gradients(model, SPIDER)[0])
        optimizer.step()
        optimizer.zero_grad()
        after_step(model, PluginContext(world.mesh, precision=precision))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]
