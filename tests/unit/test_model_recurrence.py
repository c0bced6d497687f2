"""The loop: halting weights, injection, adapter, and the whole core against the equations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from spider_titan.models.common.attention import attention_mask
from spider_titan.models.common.rotary import rotary_table
from spider_titan.models.spider.engram import conv_mask
from spider_titan.models.spider.model import SpiderOutput
from spider_titan.models.spider.recurrence import LTIInjection, RecurrentCore, act_weights

from .reference.attention import rms_norm
from .reference.tiny import enliven, lively_spider, packed_rows, spider_config


def naive_act(probs: list[float], epsilon: float) -> list[float]:
    """One position's weights (Graves 2016): the probability while their sum stays below 1 - epsilon, then the rest."""
    weights, total = [], 0.0
    for t, p in enumerate(probs):
        if t == len(probs) - 1 or total + p >= 1 - epsilon:
            return [*weights, 1 - total] + [0.0] * (len(probs) - t - 1)
        weights.append(p)
        total += p
    raise AssertionError("the last loop takes the rest")


HALTING = {
    "all at once": torch.full((4, 2, 3), 1.0),
    "nearly at once": torch.full((4, 2, 3), 0.995),
    "never": torch.zeros(4, 2, 3),
    "hardly ever": torch.full((4, 2, 3), 1e-4),
    "evenly": torch.full((4, 2, 3), 0.25),
    "one loop": torch.full((1, 2, 3), 0.3),
    "mixed": torch.rand(6, 30, 40, generator=torch.Generator().manual_seed(0)),
    "mixed, small": torch.rand(9, 30, 40, generator=torch.Generator().manual_seed(1)) ** 3,
}


@pytest.mark.parametrize("epsilon", [0.01, 0.2])
@pytest.mark.parametrize("kind", HALTING)
def test_act_weights_equal_a_loop_and_sum_to_one(kind: str, epsilon: float) -> None:
    probs = HALTING[kind]
    weights = act_weights(probs, epsilon)
    expected = torch.empty_like(probs, dtype=torch.float64)
    for row in range(probs.shape[1]):
        for slot in range(probs.shape[2]):
            expected[:, row, slot] = torch.tensor(naive_act(probs[:, row, slot].tolist(), epsilon))
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-6)
    total = torch.zeros_like(weights[0])
    for weight in weights:
        total = total + weight
    assert torch.equal(total, torch.ones_like(total))
    assert (weights >= 0).all()


def test_act_edge_is_one_minus_epsilon() -> None:
    """A sum of exactly 1 - epsilon halts; the numbers are exact in binary."""
    probs = torch.tensor([0.5, 0.25, 0.125]).view(3, 1, 1)
    assert act_weights(probs, 0.25).flatten().tolist() == [0.5, 0.5, 0.0]
    assert act_weights(probs, 0.125).flatten().tolist() == [0.5, 0.25, 0.25]


def test_act_gradient_equals_the_loops() -> None:
    probs = HALTING["mixed"].clone().requires_grad_()
    values = torch.randn(probs.shape, generator=torch.Generator().manual_seed(2))
    (act_weights(probs, 0.01) * values).sum().backward()
    for row, slot in ((0, 0), (3, 7), (29, 39), (11, 20)):
        column = probs[:, row, slot].tolist()
        halting_loop = next(t for t in range(6) if t == 5 or sum(column[: t + 1]) >= 0.99)
        rest = values[halting_loop, row, slot]
        expected = [float(values[t, row, slot] - rest) if t < halting_loop else 0.0 for t in range(6)]
        torch.testing.assert_close(probs.grad[:, row, slot], torch.tensor(expected))


@pytest.mark.parametrize("log_dt", [-1e30, -100.0, -16.5, 0.0, 4.5, 100.0, 1e30])
@pytest.mark.parametrize("log_a", [-1e30, -20.0, 0.0, 20.0, 1e30])
def test_decay_stays_between_zero_and_one(log_dt: float, log_a: float) -> None:
    injection = LTIInjection(spider_config())
    enliven(injection)
    with torch.no_grad():
        injection.log_dt.fill_(log_dt)
        injection.log_a.fill_(log_a)
    decay = injection.decay()
    assert (decay > 0).all() and (decay < 1).all()
    injection(*torch.randn(3, 2, 5, 32)).square().sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in injection.parameters())


def test_injection_is_the_equation() -> None:
    injection = LTIInjection(spider_config())
    enliven(injection)
    h, e, y = torch.randn(3, 2, 5, 32)
    decay = [math.exp(-math.exp(float(injection.log_dt.detach()) + a)) for a in injection.log_a.tolist()]
    expected = torch.tensor(decay) * h + injection.Bv * e + y
    torch.testing.assert_close(injection(h, e, y), expected)


def core_inputs() -> dict[str, Any]:
    """Eleven slots: null, two documents, two unused."""
    torch.manual_seed(5)
    slots = 11
    documents = torch.tensor([[-2, 0, 0, 0, 0, 1, 1, 1, 1, -3, -3]])
    memory = {str(layer): (torch.randn(1, slots, 32), torch.randn(1, slots, 32)) for layer in (0, 1)}
    return {
        "z_BSD": torch.randn(1, slots, 32),
        "rotary": rotary_table(slots, torch.tensor([1.0, 0.1], dtype=torch.float64), torch.device("cpu")),
        "mask": attention_mask(documents, 4),
        "filled_BS": documents >= 0,
        "memories": memory,
        "conv_mask": conv_mask(documents),
    }


@pytest.mark.parametrize("num_loops", [1, 2, 3, 5])
def test_the_core_is_its_equations(num_loops: int) -> None:
    """The layers and gates are tested elsewhere; here is what joins them, position by position for the halting."""
    core = RecurrentCore(spider_config(num_loops=3))
    enliven(core)
    inputs = core_inputs()
    out = core(**inputs, num_loops=num_loops)

    e = h = inputs["z_BSD"]
    states, probs = [], []
    for t in range(num_loops):
        last = min(t, 2)
        y = rms_norm(h + e + core.loop_embedding.weight[last], core.input_norm.weight, 1e-6)
        for index in (0, 1):
            gate = core.engram_gates[str(index)]
            y = y + gate(y, inputs["memories"][str(index)], inputs["conv_mask"])
            y, _ = core.layers[index](y, inputs["rotary"], inputs["mask"], inputs["filled_BS"])
        low = (y @ core.adapter.down_proj.weight.T) * core.adapter.scale.weight[last]
        y = y + low @ core.adapter.up_proj.weight.T
        h = core.injection.decay() * h + core.injection.Bv * e + y
        states.append(h)
        probs.append(torch.sigmoid(h @ core.halt_predictor.weight[0] + core.halt_predictor.bias))
    for slot in range(11):
        weights = naive_act([float(p[0, slot]) for p in probs], 0.01)
        expected = sum(weight * state[0, slot] for weight, state in zip(weights, states, strict=True))
        torch.testing.assert_close(out.r[0, slot], expected, rtol=1e-4, atol=1e-4)
        loops = sum(weight * (t + 1) for t, weight in enumerate(weights))
        assert float(out.ponder[0, slot]) == pytest.approx(loops, rel=1e-4)
    assert out.router.load_BE.shape == (num_loops * 2, 1, 4)


def test_the_recurrent_layer_is_pre_norm_residual() -> None:
    layer = RecurrentCore(spider_config()).layers[0]
    enliven(layer)
    inputs = core_inputs()
    x = inputs["z_BSD"]
    y = x + layer.attention(rms_norm(x, layer.attention_norm.weight, 1e-6), inputs["rotary"], inputs["mask"])
    y = y + layer.moe(rms_norm(y, layer.moe_norm.weight, 1e-6), inputs["filled_BS"])[0]
    actual, _ = layer(x, inputs["rotary"], inputs["mask"], inputs["filled_BS"])
    torch.testing.assert_close(actual, y, rtol=1e-4, atol=1e-5)


def test_loops_are_the_configs_unless_told_otherwise() -> None:
    model = lively_spider()
    ids = packed_rows()
    assert torch.equal(model(ids).logits, model(ids, num_loops=3).logits)
    assert not torch.allclose(model(ids).logits, model(ids, num_loops=2).logits)


def test_statistics_of_the_core_do_not_see_unused_slots() -> None:
    """A row with slots to spare counts the same as one with just enough."""
    model = lively_spider()
    model.boundary_predictor.bias.fill_(-4.0)
    ids = packed_rows()
    needed = int(model(ids).filled.sum(-1).max()) / ids.shape[1]
    tight, loose = model(ids, max_boundary_rate=needed), model(ids, max_boundary_rate=1.0)
    assert tight.filled.shape[1] < loose.filled.shape[1]

    def halting(out: SpiderOutput) -> Tensor:
        return (out.ponder * out.filled).sum(-1)

    torch.testing.assert_close(tight.logits, loose.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(halting(tight), halting(loose), rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(tight.router, loose.router, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
