"""Spider's metrics of loops, experts and memories, against what the modules put out, gathered by hooks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spider_titan.models.spider.losses import entropy_share
from spider_titan.spec import Batch, LossTerms, StepContext, get_model_spec
from spider_titan.validate import add_sums
from spider_titan.vocabulary import PAD_ID

from .reference.tiny import lively_spider, next_ids, packed_rows

SPIDER = get_model_spec("spider")
LOOPS, LAYERS, EXPERTS = 3, 2, 4


def loss_of(model: nn.Module, ids: Tensor) -> LossTerms:
    return SPIDER.loss(model, Batch(ids, next_ids(ids)), StepContext(num_targets=100, max_boundary_rate=0.7))


def record(model: nn.Module, names: list[str]) -> dict[str, list[Tensor]]:
    """What the modules put out in each call, filled by later forwards."""
    outputs: dict[str, list[Tensor]] = {name: [] for name in names}
    modules = dict(model.named_modules())

    def keep(name: str) -> Any:
        return lambda module, args, output: outputs[name].append(output)

    for name in names:
        modules[name].register_forward_hook(keep(name))
    return outputs


def mean_norm(x_BSD: Tensor, filled: Tensor) -> float:
    return sum(float(vector.double().square().sum().sqrt()) for vector in x_BSD[filled]) / int(filled.sum())


@torch.no_grad()
def test_metrics_are_means_over_segments() -> None:
    model = lively_spider()
    gates = ["core.engram_gates.0", "core.engram_gates.1"]
    routers = ["core.layers.0.moe.router", "core.layers.1.moe.router"]
    outputs = record(model, ["core.injection", "core", *gates, *routers])
    ids = packed_rows()
    metrics = SPIDER.metrics(loss_of(model, ids).sums)
    filled = model(ids, max_boundary_rate=0.7).filled
    assert not filled[:, 0].any() and not filled.all(-1).any(), "null and unused slots are there to be left out"

    for t in range(LOOPS):
        assert metrics[f"hidden_norm/{t + 1}"] == pytest.approx(mean_norm(outputs["core.injection"][t], filled))
        entropies = []
        for router in routers:
            mean = outputs[router][t][2].probs_BE.sum(0).double() / int(filled.sum())
            entropies.append(-sum(float(p) * math.log(float(p)) for p in mean) / math.log(EXPERTS))
        assert metrics[f"routing_entropy/{t + 1}"] == pytest.approx(min(entropies), rel=1e-5)
        chosen = [outputs[router][t][1][filled].flatten() for router in routers]
        counts = torch.stack([torch.bincount(experts, minlength=EXPERTS) for experts in chosen])
        even = int(filled.sum()) * 2 / EXPERTS
        assert metrics[f"expert_load_max/{t + 1}"] == pytest.approx(int(counts.max()) / even)
        assert metrics[f"expert_load_min/{t + 1}"] == pytest.approx(int(counts.min()) / even)
    for index, gate in enumerate(gates):
        norms = [mean_norm(outputs[gate][t], filled) for t in range(LOOPS)]
        assert metrics[f"engram_norm/{index + 1}"] == pytest.approx(sum(norms) / LOOPS, rel=1e-5)


def test_the_load_of_the_experts_is_kept_for_each_loop() -> None:
    model, ids = lively_spider(), packed_rows()
    load = loss_of(model, ids).sums["expert_load"]
    assert load.shape == (LOOPS, LAYERS, EXPERTS)
    context = StepContext(num_targets=100, max_boundary_rate=0.7, num_loops=1)
    of_one_loop = SPIDER.loss(model, Batch(ids, next_ids(ids)), context).sums["expert_load"]
    assert torch.equal(load[:1], of_one_loop) and not torch.equal(load[0], load[-1])


def gradient_norms(model: nn.Module, ids: Tensor) -> tuple[list[float], dict[str, float]]:
    """Of the segments' state after each loop: by autograd's own record, and as metrics have them after the backward."""
    outputs = record(model, ["core.injection", ""])
    states = outputs["core.injection"]
    squares, elsewhere = [0.0] * LOOPS, 0.0
    totals: dict[str, Tensor] = {}
    for row in ids.split(1):
        states.clear()
        terms = loss_of(model, row)
        for state in states:
            if state.requires_grad:
                state.retain_grad()
        terms.total.backward()
        add_sums(totals, terms.sums)
        for t, state in enumerate(states):
            if state.grad is not None:
                filled = outputs[""][-1].filled
                squares[t] += float(state.grad[filled].double().square().sum())
                elsewhere += float(state.grad[~filled].double().square().sum())
    assert elsewhere > 0.0, "the null slot has a gradient, but is no segment"
    return [math.sqrt(square) for square in squares], SPIDER.metrics(totals)


@pytest.mark.parametrize("backprop_loops", [0, 2])
def test_gradient_norms_of_loops_are_those_of_the_whole_step(backprop_loops: int) -> None:
    expected, metrics = gradient_norms(lively_spider(backprop_loops=backprop_loops), packed_rows())
    logged = [metrics[f"loop_grad_norm/{t}"] for t in range(1, LOOPS + 1)]
    assert logged == pytest.approx(expected, rel=1e-5)
    assert (logged[0] == 0.0) == bool(backprop_loops)
    assert min(logged[1:]) > 0.0


def test_gradients_do_not_depend_on_their_norms_being_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients() -> list[Tensor]:
        model = lively_spider()
        loss_of(model, packed_rows()).total.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    watched = gradients()
    monkeypatch.setattr(Tensor, "register_hook", lambda tensor, hook: None)
    assert all(torch.equal(*pair) for pair in zip(watched, gradients(), strict=True))


def test_halting_shares_sum_to_one_and_give_the_expected_loops() -> None:
    metrics = SPIDER.metrics(loss_of(lively_spider(), packed_rows()).sums)
    shares = [metrics[f"halting_share/{t}"] for t in range(1, LOOPS + 1)]
    assert sum(shares) == pytest.approx(1.0)
    assert sum(t * share for t, share in enumerate(shares, 1)) == pytest.approx(metrics["expected_loops"], rel=1e-5)


def test_the_spread_of_boundary_logits_is_that_of_real_bytes() -> None:
    model, ids = lively_spider(), packed_rows()
    ids[-1, -5:] = PAD_ID
    logits = model(ids, max_boundary_rate=0.7).raw_boundary_logits.detach()[ids != PAD_ID].double()
    spread = SPIDER.metrics(loss_of(model, ids).sums)["boundary_logit_spread"]
    assert spread == pytest.approx(float(logits.std(correction=0)), rel=1e-6)


def test_sums_of_micro_batches_give_the_same_metrics() -> None:
    model, ids = lively_spider(), packed_rows()
    whole, totals = loss_of(model, ids).sums, dict[str, Tensor]()
    for row in ids.split(1):
        add_sums(totals, loss_of(model, row).sums)
    for name, value in SPIDER.metrics(whole).items():
        assert SPIDER.metrics(totals)[name] == pytest.approx(value, rel=1e-5), name


def test_a_model_without_memories_has_no_such_metric() -> None:
    metrics = SPIDER.metrics(loss_of(lively_spider(engram_layers=()), packed_rows()).sums)
    assert [name for name in metrics if name.startswith("engram_norm")] == []
    assert f"hidden_norm/{LOOPS}" in metrics


def test_entropy_is_one_where_even_and_zero_where_collapsed() -> None:
    share = entropy_share(torch.tensor([[3.0, 3.0, 3.0, 3.0], [0.0, 0.0, 5.0, 0.0], [1.0, 1.0, 0.0, 0.0]]))
    assert share.tolist() == pytest.approx([1.0, 0.0, 0.5])
    assert entropy_share(torch.tensor([[7.0]])).tolist() == [1.0]
