"""Activation checkpointing changes what is computed when, and no bit of what is computed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from spider_titan.distributed import CommConfig, ParallelismConfig, join_world
from spider_titan.models.common.init import clean_fqn
from spider_titan.plugins import PluginContext, activation_checkpoint
from spider_titan.plugins import compile as compile_plugin
from spider_titan.plugins.activation_checkpoint import ActivationCheckpointConfig
from spider_titan.plugins.compile import CompileConfig
from spider_titan.spec import Batch, Block, LossTerms, ModelSpec, ParamGroup, StepContext, get_model_spec
from spider_titan.vocabulary import VOCAB_SIZE

from .reference.tiny import byte_transformer_config, lively_model, next_ids, packed_rows, spider_config

CONFIGS = {
    "spider, 1 loop": spider_config(num_loops=1),
    "spider, 3 loops": spider_config(num_loops=3),
    "byte_transformer": byte_transformer_config(),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with join_world(ParallelismConfig(), CommConfig()) as world:
        yield world.mesh


def whole_batch() -> Batch:
    return Batch(packed_rows(), next_ids(packed_rows()))


def micro_batches() -> list[Batch]:
    whole = whole_batch()
    return [Batch(whole.input_ids[rows], whole.targets[rows]) for rows in (slice(0, 2), slice(2, 4))]


def step_context() -> StepContext:
    return StepContext(whole_batch().num_targets, "topk", "fixed", max_boundary_rate=0.34)


def spec_of(config: Any) -> ModelSpec:
    return get_model_spec("spider" if hasattr(config, "num_loops") else "byte_transformer")


def checkpointed(model: nn.Module, spec: ModelSpec, mode: str, mesh: DeviceMesh) -> nn.Module:
    context = PluginContext(mesh, activation_checkpoint=ActivationCheckpointConfig(mode=mode))
    return activation_checkpoint.apply(model.train(), spec, context)


def run_step(model: nn.Module, spec: ModelSpec) -> tuple[list[LossTerms], dict[str, Tensor]]:
    """Loss terms of two micro-batches, and the gradients they add up to."""
    model.zero_grad()
    terms = []
    for batch in micro_batches():
        terms.append(spec.loss(model, batch, step_context()))
        terms[-1].total.backward()
    return terms, {clean_fqn(name): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", CONFIGS)
def test_no_bit_changes(name: str, mode: str, mesh: DeviceMesh) -> None:
    config = CONFIGS[name]
    spec, model = spec_of(config), lively_model(config).train()
    keys = list(model.state_dict())
    terms, gradients = run_step(model, spec)
    checkpointed(model, spec, mode, mesh)
    again, same = run_step(model, spec)
    assert list(model.state_dict()) == keys
    assert same.keys() == gradients.keys()
    for key, value in gradients.items():
        assert torch.equal(same[key], value), key
    for mine, theirs in zip(again, terms, strict=True):
        assert torch.equal(mine.total, theirs.total)
        assert mine.sums.keys() == theirs.sums.keys()
        for key, value in theirs.sums.items():
            assert torch.equal(mine.sums[key], value), key


@pytest.mark.parametrize(("mode", "times"), [("none", 1), ("selective", 2), ("full", 2)])
def test_every_loop_is_recomputed_once(mode: str, times: int, mesh: DeviceMesh) -> None:
    config = CONFIGS["spider, 3 loops"]
    spec, model = spec_of(config), lively_model(config)
    applications = {fqn: block for block in spec.blocks(model) for fqn in block.applications}
    calls: Counter[str] = Counter()
    for fqn in applications:
        model.get_submodule(fqn).register_forward_pre_hook(lambda *_, fqn=fqn: calls.update([fqn]))
    checkpointed(model, spec, mode, mesh)
    spec.loss(model, whole_batch(), step_context()).total.backward()
    assert calls == {fqn: times * (3 if block.kind == "looped" else 1) for fqn, block in applications.items()}
    assert any(fqn.startswith("core.engram_gates.") for fqn in applications)


class OperatorCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("num_loops", "dtype"), [(1, torch.float32), (3, torch.float32), (2, torch.bfloat16)])
def test_selective_repeats_no_product_and_no_attention(num_loops: int, dtype: torch.dtype, mesh: DeviceMesh) -> None:
    calls = {}
    for mode in ("none", "selective", "full"):
        config = spider_config(num_loops=num_loops)
        spec, model = spec_of(config), lively_model(config).to(dtype)
        model.boundary_predictor.float()
        checkpointed(model, spec, mode, mesh)
        with OperatorCounter() as counter:
            spec.loss(model, whole_batch(), step_context()).total.backward()
        calls[mode] = counter.calls
    grouped = "aten::_grouped_mm" if dtype == torch.bfloat16 else "spider_titan::grouped_mm"
    for name in ("aten::mm", "aten::addmm", grouped, "aten::_scaled_dot_product_flash_attention_for_cpu"):
        assert calls["selective"][name] == calls["none"][name] < calls["full"][name], name
    assert calls["selective"]["aten::topk"] == calls["none"]["aten::topk"] == 2 * num_loops
    assert calls["selective"]["aten::silu"] == 2 * calls["none"]["aten::silu"]


def peak_bytes(run: Callable[[], object]) -> tuple[int, int]:
    """(most, last): bytes that torch's allocator held on top of those before, at any time and at the end."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most, held


def test_memory_falls(mesh: DeviceMesh) -> None:
    peaks = {}
    for num_loops in (1, 3):
        for mode in ("none", "selective", "full"):
            config = spider_config(num_loops=num_loops)
            spec, model = spec_of(config), lively_model(config)
            checkpointed(model, spec, mode, mesh)
            run = lambda: spec.loss(model, whole_batch(), step_context()).total.backward()  # noqa: B023, E731
            run()
            model.zero_grad()
            most, last = peak_bytes(run)
            gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
            assert last == gradients, "the measure misses something: only gradients are left"
            peaks[num_loops, mode] = most - gradients
    for num_loops in (1, 3):
        assert peaks[num_loops, "none"] > 1.3 * peaks[num_loops, "selective"]
        assert peaks[num_loops, "selective"] > 1.3 * peaks[num_loops, "full"]
    # A loop more leaves behind its layers' inputs, and not what happens within them.
    for mode in ("selective", "full"):
        added = {kind: peaks[3, kind] - peaks[1, kind] for kind in ("none", mode)}
        assert added[mode] < added["none"] / 2


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_wrapped_before_there_are_weights(mode: str, mesh: DeviceMesh) -> None:
    """As the trainer does it: names, groups, counts and initial weights are those of the plain model."""
    config = CONFIGS["spider, 3 loops"]
    spec = spec_of(config)
    plain = spec.build(config, seed=5)
    model = checkpointed(spec.build(config, device="meta"), spec, mode, mesh)
    model.to_empty(device="cpu")
    spec.init_weights(model, 5)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for key, value in plain.state_dict().items():
        assert torch.equal(state[key], value), key
    groups = [(group.name, list(group.parameters)) for group in spec.param_groups(model)]
    assert groups == [(group.name, list(group.parameters)) for group in spec.param_groups(plain)]
    assert spec.parameter_counts(model) == spec.parameter_counts(plain)
    totals = spec.loss(model, whole_batch(), step_context()).sums
    spec.after_step(model, totals, step_context())
    spec.after_step(plain, totals, step_context())
    assert torch.equal(model.state_dict()["boundary_predictor.bias"], plain.boundary_predictor.bias)


class Noisy(nn.Module):
    """Embedding, one application of a block with dropout a loop, head."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Dropout(0.5), nn.GELU(), nn.Linear(32, 16)) for _ in range(num_blocks)
        )
        self.head = nn.Linear(16, VOCAB_SIZE)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(2):
            for layer in self.layers:
                x = x + layer(x)
        return self.head(x)


def noisy_loss(model: Noisy, batch: Batch, context: StepContext) -> LossTerms:
    total = nn.functional.cross_entropy(model(batch.input_ids).flatten(0, 1), batch.targets.flatten(), reduction="sum")
    return LossTerms(total / context.num_targets, {"nats": total.detach()})


def noisy_spec() -> ModelSpec:
    return ModelSpec(
        name="noisy",
        config_class=int,
        flavors={},
        construct=Noisy,
        init_weights=lambda model, seed: None,
        blocks=lambda model: [Block(f"layers.{index}", kind="looped") for index in range(len(model.layers))],
        param_groups=lambda model: [ParamGroup("all", dict(model.named_parameters()))],
        loss=noisy_loss,
        metrics=lambda totals: {},
        flops_per_byte=lambda config, seq_len: 0.0,
        parameter_counts=lambda model: {},
        after_step=lambda model, totals, context: None,
    )


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_dropout_drops_the_same_again(mode: str, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    model = Noisy(2)

    def seeded_step() -> tuple[dict[str, Tensor], Tensor]:
        torch.manual_seed(1)
        _, gradients = run_step(model, noisy_spec())
        return gradients, torch.rand(3)

    gradients, following = seeded_step()
    checkpointed(model, noisy_spec(), mode, mesh)
    same, following_same = seeded_step()
    for key, value in gradients.items():
        assert torch.equal(same[key], value), key
    assert torch.equal(following_same, following)


def test_memory_budget(mesh: DeviceMesh) -> None:
    """The compiler keeps less at a lower budget, with the same gradients."""
    config = byte_transformer_config(num_layers=3)
    spec = spec_of(config)
    results = []
    for budget in (1.0, 0.0):
        # What was compiled under another budget would be used again.
        torch._dynamo.reset()
        context = PluginContext(
            mesh,
            activation_checkpoint=ActivationCheckpointConfig(mode="memory_budget", memory_budget=budget),
            compile=CompileConfig(enable=True, backend="aot_eager_decomp_partition"),
        )
        model = activation_checkpoint.apply(lively_model(config).train(), spec, context)
        compile_plugin.apply(model, spec, context)
        _, gradients = run_step(model, spec)
        peak, _ = peak_bytes(lambda: run_step(model, spec))  # noqa: B023
        results.append((gradients, peak))
    activation_checkpoint.apply(model, spec, PluginContext(mesh))
    assert torch._functorch.config.activation_memory_budget == 1.0
    (gradients, peak), (same, lower) = results
    assert peak > 1.5 * lower
    for key, value in gradients.items():
        assert torch.equal(same[key], value), key


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "full", "memory_budget": 0.5}, "memory_budget = 0.5 is for mode = memory_budget, not full"),
        ({"mode": "memory_budget"}, "memory_budget = None must be given"),
        ({"mode": "memory_budget", "memory_budget": 1.5}, "memory_budget = 1.5 must be given, from 0 to 1"),
    ],
)
def test_mistakes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ActivationCheckpointConfig(**options)


def test_a_budget_needs_the_compiler() -> None:
    config = ActivationCheckpointConfig(mode="memory_budget", memory_budget=0.5)
    with pytest.raises(ValueError, match=r"activation_checkpoint\.mode = memory_budget needs compile\.enable = true"):
        activation_checkpoint.check(config, CompileConfig())
    activation_checkpoint.check(config, CompileConfig(enable=True))
    activation_checkpoint.check(ActivationCheckpointConfig(mode="full"), CompileConfig())


def test_says_what_it_did(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    checkpointed(Noisy(2), noisy_spec(), "none", mesh)
    assert not caplog.messages
    checkpointed(Noisy(2), noisy_spec(), "full", mesh)
    assert caplog.messages == ["activation checkpointing: full, everything is recomputed in 2 modules"]
    checkpointed(Noisy(0), noisy_spec(), "selective", mesh)
    assert caplog.records[-1].levelno == logging.WARNING
    assert "nothing to do for mode = selective" in caplog.messages[-1]
