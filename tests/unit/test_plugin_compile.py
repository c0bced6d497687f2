"""Compiled blocks compute what plain ones do, and nothing is compiled once training has begun."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from spider_titan.curriculum import PhaseConfig
from spider_titan.distributed import CommConfig, ParallelismConfig, World, join_world
from spider_titan.models.common.attention import _flex_mask, attention_mask
from spider_titan.models.common.documents import document_numbers
from spider_titan.models.common.grouped import grouped_mm
from spider_titan.models.common.init import clean_fqn
from spider_titan.models.common.rotary import rotary_table
from spider_titan.models.spider.moe import Router
from spider_titan.plugins import PluginContext, apply_plugins
from spider_titan.plugins import compile as compile_plugin
from spider_titan.plugins.activation_checkpoint import ActivationCheckpointConfig
from spider_titan.plugins.activation_checkpoint import apply as checkpoint
from spider_titan.plugins.compile import CompileConfig, CompileError, WarmUp, compiled_modules, warm_up
from spider_titan.plugins.precision import PrecisionConfig
from spider_titan.spec import Batch, Block, LossTerms, ModelSpec, StepContext, get_model_spec

from .reference.tiny import byte_transformer_config, lively_model, next_ids, packed_rows, spider_config

SPIDER = spider_config(num_loops=2, num_recurrent_layers=1, engram_layers=(0,))
NO_MEMORY = replace(SPIDER, engram_layers=())
SPEC = get_model_spec("spider")
PHASES = [
    PhaseConfig(until=0.3, boundary="fixed"),
    PhaseConfig(until=0.6, boundary="fixed", selection="threshold"),
    PhaseConfig(until=1.0, boundary="adaptive"),
]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world(ParallelismConfig(), CommConfig()) as world:
        yield world


@pytest.fixture(autouse=True, scope="module")
def nothing_compiled_yet() -> None:
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    """What the plugin sets is the process's, and so is what was compiled by the tests before."""
    with (
        torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=256),
        torch._functorch.config.patch(force_non_lazy_backward_lowering=False),
    ):
        yield


def whole_batch() -> Batch:
    return Batch(packed_rows(), next_ids(packed_rows()))


def step_context(**changes: Any) -> StepContext:
    context = StepContext(whole_batch().num_targets, "topk", "fixed", max_boundary_rate=0.34)
    return replace(context, **changes)


def compiled(model: nn.Module, spec: ModelSpec, world: World, mode: str = "none", **options: Any) -> nn.Module:
    context = PluginContext(
        world.mesh,
        activation_checkpoint=ActivationCheckpointConfig(mode=mode),
        compile=CompileConfig(enable=True, **options),
    )
    return compile_plugin.apply(checkpoint(model.train(), spec, context), spec, context)


def run_step(model: nn.Module, spec: ModelSpec = SPEC, **changes: Any) -> dict[str, Tensor]:
    """Loss, its sums, and gradients."""
    model.zero_grad()
    terms = spec.loss(model, whole_batch(), step_context(**changes))
    terms.total.backward()
    results = {"loss": terms.total.detach(), **terms.sums}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            results[clean_fqn(name)] = grad.clone()
    return results


def assert_equal(results: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(results[name], value), name


def assert_close(results: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To 1e-4 of the largest value: compilers add in another order, and through all loops that came to 2e-5."""
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        bound = 1e-4 * float(value.abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(results[name], value, rtol=0, atol=bound, msg=name)


@pytest.mark.parametrize("component", ["prelude", "boundary_predictor", "engram", "core", "coda", None])
def test_each_component(component: str | None, world: World) -> None:
    """The backend runs what was traced by the same kernels: any difference would be a fault of the trace."""
    model = lively_model(SPIDER).train()
    expected, keys = run_step(model), list(model.state_dict())
    compiled(model, SPEC, world, components=[component] if component else [], backend="eager")
    own = {name.split(".")[0] for name in compiled_modules(model)}
    assert own == ({component} if component else {"prelude", "boundary_predictor", "engram", "core", "coda"})
    assert_equal(run_step(model), expected)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_traced_gradients_and_checkpointing(mode: str, world: World) -> None:
    model = lively_model(NO_MEMORY).train()
    expected = run_step(model)
    compiled(model, SPEC, world, mode, components=["core"], backend="aot_eager")
    assert_close(run_step(model), expected)


@pytest.mark.slow
def test_the_default_backend(world: World) -> None:
    model = lively_model(NO_MEMORY).train()
    expected = run_step(model)
    compiled(model, SPEC, world, "full", components=["core"])
    assert_close(run_step(model), expected)


def steer(model: nn.Module, step: int) -> None:
    """Boundaries from none to all, and tokens from everywhere to one expert alone."""
    model.boundary_predictor.bias.fill_((-1e3, -1.0, 0.0, 1.0, 1e3)[step % 5])
    for router in (module for module in model.modules() if isinstance(module, Router)):
        router.balance_bias.zero_()
        if step % 3:
            router.balance_bias[step % router.balance_bias.numel()] = 10.0


def random_batch(step: int) -> Batch:
    """Rows with joints at other places, and now and then without any target."""
    ids = packed_rows().roll(step, dims=1).roll(step, dims=0)
    targets = next_ids(ids) if step % 7 else torch.full_like(ids, int(packed_rows().max()))
    return Batch(ids, targets)


def plan(*, validates: bool = True) -> WarmUp:
    return WarmUp(PHASES, whole_batch(), validates=validates)


def test_nothing_is_compiled_after_warm_up(world: World) -> None:
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 1
    config = replace(SPIDER, num_loops=1, experts_per_token=1)
    model = compiled(lively_model(config), SPEC, world, backend="eager")
    warm_up(model, SPEC, plan())
    graphs = counters["stats"]["unique_graphs"]
    rates, loads = set(), set()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(200):
            phase = PHASES[step * len(PHASES) // 200]
            context = StepContext(
                256,
                phase.boundary_mode,
                phase.boundary,
                phase.boundary_capacity,
                frozenset({"boundary_predictor"} if step < 20 else ()),
            )
            steer(model, step)
            terms = SPEC.loss(model, random_batch(step), context)
            terms.total.backward()
            rates.add(round(SPEC.metrics(terms.sums)["boundary_rate"], 2))
            loads.add(tuple((terms.sums["expert_load"].sum(0)[0] > 0).tolist()))
            if step % 50 == 0:
                model.eval()
                with torch.no_grad():
                    SPEC.loss(model, random_batch(step), StepContext(1, max_boundary_rate=phase.boundary_capacity))
                model.train()
    assert counters["stats"]["unique_graphs"] == graphs
    assert min(rates) < 0.1
    assert max(rates) > 0.4
    assert {1, config.num_experts} <= {sum(load) for load in loads}


def test_drawn_loops_and_truncation_compile_nothing_anew(world: World) -> None:
    """Loops run in plain Python; what they add is one variant without gradients, which warm-up has met."""
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 1
    config = replace(SPIDER, sample_loops="poisson", max_sampled_loops=3, backprop_loops=2)
    model = compiled(lively_model(config), SPEC, world, backend="eager")
    assert SPEC.draw_loops is not None
    assert SPEC.max_loops is not None
    warm_up(model, SPEC, replace(plan(), num_loops=SPEC.max_loops(config)))
    graphs = counters["stats"]["unique_graphs"]
    drawn = set()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(20):
            loops = SPEC.draw_loops(config, 0, step)
            drawn.add(loops)
            context = step_context(num_loops=loops)
            SPEC.loss(model, random_batch(step), context).total.backward()
    assert drawn == {1, 2, 3}
    assert counters["stats"]["unique_graphs"] == graphs


def test_warm_up_leaves_no_trace(world: World) -> None:
    class Counting(nn.Linear):
        """Moves a buffer and draws a random number in every forward."""

        def __init__(self) -> None:
            super().__init__(8, 8)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return F.dropout(super().forward(x), 0.5, self.training)

    model = nn.Sequential(Counting())
    compiled(model, toy_spec(), world, backend="eager")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    warm_up(model, toy_spec(), plan())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert counters["stats"]["unique_graphs"]


def test_the_plan_holds_each_kind_of_step_once() -> None:
    model = lively_model(SPIDER)
    twice = WarmUp([*PHASES, PhaseConfig(until=1.0)], whole_batch())
    for given in (plan(), twice):
        contexts = given.training_contexts(SPEC, model)
        kinds = {(c.boundary_mode, c.boundary_phase, c.max_boundary_rate, c.frozen_groups) for c in contexts}
        assert len(contexts) == len(kinds)
        fixed, causal, adaptive = ("topk", "fixed", 0.34), ("threshold", "fixed", 0.34), ("threshold", "adaptive", 0.45)
        late = frozenset({"boundary_predictor", "boundary_predictor_no_decay"})
        assert kinds == {(*kind, frozen) for kind in (fixed, causal, adaptive) for frozen in (frozenset(), late)}
        assert [c.max_boundary_rate for c in given.validation_contexts()] == [0.34, 0.45]
    assert not plan(validates=False).validation_contexts()
    baseline = lively_model(byte_transformer_config())
    contexts = plan().training_contexts(get_model_spec("byte_transformer"), baseline)
    assert {c.frozen_groups for c in contexts} == {frozenset()}


def toy_loss(model: nn.Sequential, batch: Batch, context: StepContext) -> LossTerms:
    total = model(batch.input_ids[..., :8].float()).square().sum()
    return LossTerms(total / context.num_targets, {"total": total.detach()})


def toy_spec(num_blocks: int = 1) -> ModelSpec:
    return replace(
        SPEC,
        name="toy",
        blocks=lambda model: [Block(str(index)) for index in range(num_blocks)],
        param_groups=lambda model: [],
        loss=toy_loss,
    )


def raising_backward(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    raise NotImplementedError("no kernel for this backward")


torch._dynamo.register_backend(
    aot_autograd(fw_compiler=lambda graph, inputs: graph.forward, bw_compiler=raising_backward), name="no_backward"
)


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


def test_a_block_that_cannot_be_compiled_is_named(world: World) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Branching(8, 8))
    run_step(model, toy_spec(2))
    compiled(model, toy_spec(2), world, backend="eager")
    with pytest.raises(CompileError) as caught:
        warm_up(model, toy_spec(2), plan())
    message = str(caught.value)
    assert message.startswith("'1' cannot be compiled as one graph: Data-dependent branching")
    assert message.endswith("leave '1' out of compile.components, or set compile.enable = false")
    assert "\n" not in message


def test_a_backward_that_cannot_be_compiled_is_named(world: World) -> None:
    model = compiled(nn.Sequential(nn.Linear(8, 8), nn.GELU()), toy_spec(2), world, backend="no_backward")
    with pytest.raises(CompileError, match=r"'0' cannot be compiled .*no kernel for this backward"):
        run_step(model, toy_spec(2))


def test_an_error_of_the_model_itself_passes(world: World) -> None:
    class Lookup(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.long())

    model = compiled(nn.Sequential(Lookup(8, 8)), toy_spec(), world, backend="eager")
    with pytest.raises(IndexError):
        run_step(model, toy_spec())


def test_a_copy_has_weights_of_its_own(world: World) -> None:
    model = compiled(nn.Sequential(nn.Linear(8, 8)), toy_spec(), world, backend="eager")
    copied = copy.deepcopy(model)
    torch.nn.init.zeros_(copied[0].weight)
    x = torch.ones(1, 8)
    assert torch.equal(copied(x)[0], copied[0].bias)
    assert not torch.equal(model(x), copied(x))


@pytest.mark.parametrize(("mode", "checkpointing"), [("fp32", "none"), ("bf16", "full")])
def test_sharded(mode: str, checkpointing: str, world: World) -> None:
    """A block is a compiled graph within the hooks that gather its weights; the core's parts are some within one."""
    results = []
    for enable in (False, True):
        context = PluginContext(
            world.mesh,
            PrecisionConfig(mode=mode),
            ActivationCheckpointConfig(mode=checkpointing),
            CompileConfig(enable=enable, backend="eager"),
        )
        model = SPEC.build(SPIDER, device="meta")
        model = apply_plugins(model, SPEC, context)
        model.to_empty(device="cpu")
        SPEC.init_weights(model, 1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.to_local().abs().max() == 0:
                    parameter.to_local().normal_(generator=torch.Generator().manual_seed(len(name)))
        warm_up(model.train(), SPEC, WarmUp(PHASES[::2], whole_batch()))
        with torch._dynamo.config.patch(error_on_recompile=enable):
            results.append([run_step(model), run_step(model, boundary_phase="adaptive", max_boundary_rate=0.45)])
    for plain, traced in zip(*results, strict=True):
        assert_equal(traced, plain)


def test_masks_of_the_device_kernel(world: World) -> None:
    """What the CPU can show of it: the forward is one graph, which another mask does not change."""
    config = byte_transformer_config(num_layers=1)
    model = lively_model(config)
    expected, x = [], torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(0))
    rows = [document_numbers(packed_rows().roll(step, dims=1)) for step in range(3)]
    rotary = rotary_table(64, model.frequencies, x.device)
    with torch.no_grad():
        expected = [model.layers[0](x, rotary, attention_mask(documents, 16)) for documents in rows]
        compiled(model, get_model_spec("byte_transformer"), world, backend="aot_eager")
        for step, documents in enumerate(rows):
            with torch._dynamo.config.patch(error_on_recompile=step > 0):
                out = model.layers[0](x, rotary, _flex_mask(documents, 16))
            torch.testing.assert_close(out, expected[step], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"components": ["core", "head"]}, "compile.components: 'head' is no component of the model; it has .*engram"),
        ({"backend": "fast"}, "compile.backend = 'fast' is unknown; torch has .*inductor"),
    ],
)
def test_mistakes(options: dict[str, Any], words: str, world: World) -> None:
    with pytest.raises(ValueError, match=words):
        compiled(lively_model(SPIDER), SPEC, world, **options)


def test_says_what_it_did(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spider_titan")
    model = compiled(lively_model(SPIDER), SPEC, world, components=["core"], backend="eager")
    assert caplog.messages == ["compile: 2 of 6 modules, each as one graph, by eager"]
    warm_up(model, SPEC, plan())
    assert caplog.messages[-1].startswith("compile: ready for 6 kinds of steps and 2 of validations in ")
    compiled(nn.Sequential(), toy_spec(0), world, backend="eager")
    assert caplog.records[-1].levelno == logging.WARNING
    assert caplog.messages[-1] == "compile: nothing to compile, as model 'toy' names no blocks"


@pytest.mark.parametrize("sizes", [(16, 0, 32, 0), (0, 0, 0, 48), (48, 0, 0, 0), (3, 20, 1, 24)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_product_is_the_librarys_to_the_bit(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(48, 16, generator=generator), torch.randn(4, 16, 24, generator=generator)
    x, weight = (value.to(dtype).requires_grad_() for value in (x, weight))
    ends = torch.tensor(sizes).cumsum(0).int()
    upstream = torch.randn(48, 24, generator=generator).to(dtype)
    out, reference = grouped_mm(x, weight, ends), F.grouped_mm(x, weight, offs=ends)
    assert torch.equal(out, reference)
    for mine, theirs in zip(
        torch.autograd.grad(out, (x, weight), upstream),
        torch.autograd.grad(reference, (x, weight), upstream),
        strict=True,
    ):
        assert torch.equal(mine, theirs)
    begins = [0, *ends.tolist()[:-1]]
    loop = torch.cat([x[a:b] @ weight[e] for e, (a, b) in enumerate(zip(begins, ends.tolist(), strict=True))])
    torch.testing.assert_close(out, loop)


def test_the_grouped_product_obeys_the_rules_of_an_operator() -> None:
    ends = torch.tensor([8, 8, 16], dtype=torch.int32)
    x, weight = torch.randn(16, 8, requires_grad=True), torch.randn(3, 8, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.spider_titan.grouped_mm, (x, weight, ends))
    torch.library.opcheck(torch.ops.spider_titan.grouped_mm, (x.detach().T, torch.randn(16, 8), ends))
    # A sum's gradient is one number broadcast.
    grouped_mm(x, weight, ends).sum().backward()
    torch.testing.assert_close(x.grad[:8], weight[0].sum(-1).expand(8, -1))
