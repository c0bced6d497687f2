"""mxfp8 against plain arithmetic, nvfp4's call, and what stays fp32 in every mode."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spider_titan.distributed import CommConfig, ParallelismConfig, World, join_world
from spider_titan.models.common.init import clean_fqn, copy_full_
from spider_titan.models.spider.boundary import BoundaryPredictor
from spider_titan.models.spider.moe import Router
from spider_titan.plugins import PluginContext, apply_plugins, materialize, quantize
from spider_titan.plugins.activation_checkpoint import ActivationCheckpointConfig
from spider_titan.plugins.block_scaled import SIGNS, BlockScaledLinear
from spider_titan.plugins.compile import CompileConfig
from spider_titan.plugins.precision import PrecisionConfig
from spider_titan.spec import Batch, ModelSpec, StepContext, get_model_spec

SPIDER, BYTE_TRANSFORMER = get_model_spec("spider"), get_model_spec("byte_transformer")
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "q_lora_rank": 32,
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
    "num_loops": 2,
}
CONTEXT = StepContext(num_targets=4 * 40, boundary_mode="topk", boundary_phase="fixed", max_boundary_rate=0.34)
MXFP8 = PrecisionConfig(mode="mxfp8", emulate=True)
MODES = {
    "fp32": PrecisionConfig(),
    "bf16": PrecisionConfig(mode="bf16"),
    "rowwise": PrecisionConfig(mode="fp8_dynamic", emulate=True),
    "tensorwise": PrecisionConfig(mode="fp8_dynamic", fp8_recipe="tensorwise", emulate=True),
    "mxfp8": MXFP8,
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world(ParallelismConfig(), CommConfig()) as world:
        yield world


def build(world: World, precision: PrecisionConfig, spec: ModelSpec = SPIDER, **sections: Any) -> nn.Module:
    """A small model as the trainer builds it, with the names of the bare one."""
    context = PluginContext(world.mesh, precision=precision, **sections)
    config = spec.config_class(**(SMALL_SPIDER if spec is SPIDER else {**SMALL, "num_layers": 1}))
    model = apply_plugins(spec.build(config, device="meta"), spec, context)
    materialize(model, context, world.device)
    spec.init_weights(model, 3)
    if spec is SPIDER:
        # At first the core's output is multiplied by 0.
        out_proj = model.get_parameter("out_proj.weight")
        copy_full_(out_proj, torch.randn(out_proj.shape, generator=torch.Generator().manual_seed(0)) / 6)
    return model


def make_batch() -> Batch:
    ids = torch.randint(0, 256, (4, 41), generator=torch.Generator().manual_seed(1))
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def loss_and_gradients(model: nn.Module, spec: ModelSpec = SPIDER) -> tuple[float, dict[str, Tensor]]:
    terms = spec.loss(model, make_batch(), CONTEXT)
    terms.total.backward()
    grads = {clean_fqn(name): full(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}
    return float(terms.total.detach()), grads


def round_blocks(x: Tensor, dim: int) -> Tensor:
    """Rounds to mxfp8 and back: 32 neighbours along ``dim`` share the least power of 2 that brings all into e4m3."""
    blocks = x.float().movedim(dim, -1).unflatten(-1, (-1, 32))
    exponent = (blocks.abs().amax(-1, keepdim=True) / 448.0).clamp(min=2.0**-127).log2().ceil()
    scale = torch.exp2(exponent)
    rounded = (blocks / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(-2).movedim(-1, dim)


def convert(world: World, config: PrecisionConfig, **sizes: Any) -> nn.Module:
    spec_config = BYTE_TRANSFORMER.config_class(**{**SMALL, "num_layers": 2, **sizes})
    model = BYTE_TRANSFORMER.build(spec_config, device="meta")
    return quantize.apply(model, BYTE_TRANSFORMER, PluginContext(world.mesh, precision=config))


def one_linear(world: World) -> BlockScaledLinear:
    """A converted linear, 32 -> 64, with bf16 weights."""
    linear = convert(world, MXFP8).get_submodule("layers.0.mlp.up_proj").to_empty(device="cpu").to(torch.bfloat16)
    assert isinstance(linear, BlockScaledLinear)
    with torch.no_grad():
        linear.weight.normal_(generator=torch.Generator().manual_seed(0))
    return linear


@pytest.mark.parametrize("rows", [7, 32, 21 * 3])
def test_a_linear_equals_plain_arithmetic(world: World, rows: int) -> None:
    linear = one_linear(world)
    generator = torch.Generator().manual_seed(1)
    # Rows of very different size; their number is not what mxfp8 needs, in most cases.
    x = (torch.randn(rows, 32, generator=generator) * torch.logspace(-3, 3, rows)[:, None]).bfloat16().requires_grad_()
    grad = (torch.randn(rows, 64, generator=generator) * torch.logspace(2, -6, rows)[:, None]).bfloat16()
    out = linear(x[None])
    out.backward(grad[None])

    def padded(value: Tensor) -> Tensor:
        return torch.cat((value.detach(), value.new_zeros(-rows % 32, value.shape[1])))

    # Each product has blocks along the dim that it sums over.
    weight = linear.weight.detach()
    expected = round_blocks(x.detach(), 1) @ round_blocks(weight, 1).T
    expected_x = round_blocks(grad, 1) @ round_blocks(weight, 0)
    expected_weight = round_blocks(padded(grad), 0).T @ round_blocks(padded(x), 0)
    assert out.shape == (1, rows, 64)
    assert out.dtype == x.grad.dtype == linear.weight.grad.dtype == torch.bfloat16
    # What is left is rounding to bf16, once in the product and of the operands that emulation hands on in bf16.
    for found, wanted in ((out[0], expected), (x.grad, expected_x), (linear.weight.grad, expected_weight)):
        torch.testing.assert_close(found.detach().float(), wanted, rtol=2**-7, atol=float(wanted.abs().max()) * 2**-9)


def test_the_error_is_that_of_three_bits(world: World) -> None:
    linear = one_linear(world)
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = x.double() @ linear.weight.detach().double().T
    error = float((linear(x).detach().double() - exact).norm() / exact.norm())
    assert 0.03 < error < 0.045


def test_zeros_give_finite_values(world: World) -> None:
    linear = one_linear(world)
    x = torch.cat((torch.zeros(40, 32), torch.ones(8, 32))).bfloat16().requires_grad_()
    linear(x).backward(torch.cat((torch.ones(40, 64), torch.zeros(8, 64))).bfloat16())
    assert (linear(x)[:40] == 0).all() and (x.grad[40:] == 0).all()
    assert x.grad.isfinite().all() and (linear.weight.grad == 0).all()


def test_sizes_that_do_not_fit_are_left_and_listed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spider_titan")
    model = convert(world, MXFP8, kv_lora_rank=48)
    left = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    # 48 + 16 fits, 48 does not.
    assert left == {"layers.0.attention.kv_up", "layers.1.attention.kv_up", "lm_head"}
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == ("mxfp8: 14 of 17 linears compute in mxfp8, emulated; the others stay in high precision")
    assert messages[-1] == (
        "mxfp8: kept out for sizes that are not multiples of 32: layers.*.attention.kv_up x2, 48 -> 64"
    )


def test_a_filter_that_leaves_nothing_is_an_error(world: World) -> None:
    with pytest.raises(ValueError, match=r'"mxfp8" finds no linear .* multiples of 32; skip less'):
        convert(world, PrecisionConfig(mode="mxfp8", emulate=True, skip=("layers.*",)))
    with pytest.raises(ValueError, match=r'"nvfp4" finds no linear .* 16 are left .* multiples of 128'):
        convert(world, PrecisionConfig(mode="nvfp4"))
    with pytest.raises(ValueError, match=r"precision\.skip: the pattern 'layers\.7\.\*' matches no linear"):
        convert(world, PrecisionConfig(mode="mxfp8", emulate=True, skip=("layers.7.*",)))


def test_settings_of_other_modes_are_named(world: World, caplog: pytest.LogCaptureFixture) -> None:
    convert(world, PrecisionConfig(mode="mxfp8", emulate=True, fp8_recipe="tensorwise", fp8_all_gather=True))
    assert caplog.records[0].getMessage() == (
        'precision: not used with precision.mode = "mxfp8": fp8_recipe, fp8_all_gather'
    )


def test_nvfp4_hands_torchao_what_it_takes(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels need triton and a device; a plain product stands in for them and looks at its arguments."""
    from torchao.prototype.moe_training.nvfp4_training import nvfp4_linear

    calls: list[tuple[int, ...]] = []

    def apply(rows: Tensor, weight: Tensor, bias: Any, seed: Tensor, signs: tuple[int, ...]) -> Tensor:
        calls.append((*rows.shape, *weight.shape))
        assert rows.dtype == weight.dtype == torch.bfloat16 and rows.is_contiguous() and bias is None
        assert seed.dtype == torch.int64 and seed.shape == (1,) and tuple(signs) == SIGNS and {*signs} == {1, -1}
        return rows @ weight.T

    monkeypatch.setattr(nvfp4_linear.nvfp4_mm_triton, "apply", apply)
    linear = convert(world, PrecisionConfig(mode="nvfp4"), hidden_size=128, intermediate_size=256, num_layers=1)
    linear = linear.get_submodule("layers.0.mlp.up_proj").to_empty(device="cpu").to(torch.bfloat16)
    with torch.no_grad():
        linear.weight.normal_()
    x = torch.randn(2, 100, 128).bfloat16()
    torch.testing.assert_close(linear(x), x @ linear.weight.T)
    assert calls == [(256, 128, 256, 128)]


def test_nvfp4_without_its_device_says_so(world: World) -> None:
    """Only a configuration that goes round the capability rules gets here."""
    linear = convert(world, PrecisionConfig(mode="nvfp4"), hidden_size=128, intermediate_size=128, num_layers=1)
    linear = linear.get_submodule("layers.0.mlp.up_proj").to_empty(device="cpu").to(torch.bfloat16)
    with pytest.raises(NotImplementedError):
        linear(torch.zeros(1, 128, 128).bfloat16())


def test_mxfp8_trains_near_bf16_with_names_and_weights_unchanged(world: World) -> None:
    found = {name: build(world, MODES[name]) for name in ("bf16", "mxfp8")}
    states = {name: model.state_dict() for name, model in found.items()}
    assert list(states["mxfp8"]) == list(states["bf16"])
    for name, value in states["mxfp8"].items():
        assert torch.equal(full(value), full(states["bf16"][name])), name
    converted = {name for name, module in found["mxfp8"].named_modules() if isinstance(module, BlockScaledLinear)}
    assert "core.layers.1.attention.q_up" in converted and "coda.0.mlp.down_proj" in converted
    assert not any(part in name for name in converted for part in ("boundary", "engram", "halt", "adapter", "lm_head"))
    (loss, grads), (reference, expected) = loss_and_gradients(found["mxfp8"]), loss_and_gradients(found["bf16"])
    assert loss == pytest.approx(reference, rel=1e-2) and loss != reference
    for name in converted:
        one, other = grads[f"{name}.weight"].flatten(), expected[f"{name}.weight"].flatten()
        assert torch.dot(one, other) > 0.9 * one.norm() * other.norm() > 0, name


@pytest.mark.parametrize(
    "sections",
    [
        {"activation_checkpoint": ActivationCheckpointConfig(mode="full")},
        {
            "compile": CompileConfig(enable=True, backend="aot_eager"),
            "activation_checkpoint": ActivationCheckpointConfig(mode="selective"),
        },
    ],
    ids=lambda sections: "+".join(sections),
)
def test_mxfp8_with_other_plugins(world: World, sections: dict[str, Any]) -> None:
    torch._dynamo.reset()
    expected, grads = loss_and_gradients(build(world, MXFP8, BYTE_TRANSFORMER), BYTE_TRANSFORMER)
    found, others = loss_and_gradients(build(world, MXFP8, BYTE_TRANSFORMER, **sections), BYTE_TRANSFORMER)
    assert found == pytest.approx(expected, rel=2**-9)
    for name, value in grads.items():
        torch.testing.assert_close(others[name], value, rtol=0.05, atol=0.02 * float(value.abs().max()), msg=name)


class OutputDtypes:
    """Dtypes of what modules put out, by name."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        self.found: dict[str, set[torch.dtype]] = {}
        for name in names:
            model.get_submodule(name).register_forward_hook(self.note(name))

    def note(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            values = out if isinstance(out, tuple) else (out,)
            dtypes = {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}
            self.found.setdefault(name, set()).update(dtypes)

        return hook


@pytest.mark.parametrize("mode", MODES)
def test_islands_stay_fp32(world: World, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictor, halting, router, losses and all gradients; the linears beside them do not."""
    model = build(world, MODES[mode])
    islands = (
        (BoundaryPredictor, "forward"),
        (Router, "forward"),
        (type(model.get_submodule("core")), "halting_probability"),
    )
    found: dict[str, set[torch.dtype]] = {}
    for owner, method in islands:
        watch(monkeypatch, owner, method, found.setdefault(f"{owner.__name__}.{method}", set()))
    linears = ("coda.0.mlp.up_proj", "core.layers.0.attention.q_up")
    for name in linears:
        model.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: found.setdefault(name, set()).update(float_dtypes(out))
        )
    terms = SPIDER.loss(model, make_batch(), CONTEXT)
    terms.total.backward()
    compute = torch.float32 if mode == "fp32" else torch.bfloat16
    assert [found.pop(name) for name in linears] == [{compute}, {compute}]
    assert found == {f"{owner.__name__}.{method}": {torch.float32} for owner, method in islands}
    assert terms.total.dtype == torch.float32
    assert {value.dtype for value in terms.sums.values()} <= {torch.float32, torch.float64, torch.int64}
    dtypes = {(p.dtype, p.grad.dtype) for p in model.parameters() if p.grad is not None}
    assert dtypes == {(torch.float32, torch.float32)}


def watch(monkeypatch: pytest.MonkeyPatch, owner: type, method: str, dtypes: set[torch.dtype]) -> None:
    """Notes the dtypes of what a method returns."""
    original = getattr(owner, method)

    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        dtypes.update(float_dtypes(out))
        return out

    monkeypatch.setattr(owner, method, watched)


def float_dtypes(value: Any) -> set[torch.dtype]:
    """Of all floating-point tensors in a value."""
    if isinstance(value, Tensor):
        return {value.dtype} if value.is_floating_point() else set()
    parts = value if isinstance(value, tuple) else [getattr(value, f.name) for f in dataclasses.fields(value)]
    return set().union(*map(float_dtypes, parts))
