"""Recurrence in training: drawn numbers of loops, gradients through the last loops only, the ponder cost."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from spider_titan.distributed import ParallelismConfig, imagine_world
from spider_titan.models.spider.loops import draw_loops, max_loops
from spider_titan.models.spider.losses import spider_loss
from spider_titan.models.spider.recurrence import CoreOutput, RecurrentCore, act_weights
from spider_titan.plugins import PluginContext, activation_checkpoint
from spider_titan.plugins.activation_checkpoint import ActivationCheckpointConfig
from spider_titan.spec import Batch, StepContext, get_model_spec

from .reference.tiny import enliven, lively_spider, next_ids, packed_rows, spider_config
from .test_model_recurrence import core_inputs

STEPS = 4000


@pytest.mark.parametrize(("mean", "most"), [(6, 0), (4, 5), (1, 0), (2, 3)])
def test_loops_are_a_bounded_poisson_around_their_mean(mean: int, most: int) -> None:
    config = spider_config(num_loops=mean, sample_loops="poisson", max_sampled_loops=most)
    draws = [draw_loops(config, 7, step) for step in range(STEPS)]
    bound = most or 2 * mean
    assert max_loops(config) == bound
    masses = {t: math.exp(1 - mean) * (mean - 1) ** (t - 1) / math.factorial(t - 1) for t in range(1, bound)}
    masses[bound] = 1.0 - sum(masses.values())
    assert set(draws) <= masses.keys()
    for t, mass in masses.items():
        deviation = math.sqrt(max(mass * (1 - mass), 0.0) / STEPS)
        assert abs(draws.count(t) / STEPS - mass) <= 5 * deviation, t
    expected = sum(t * mass for t, mass in masses.items())
    variance = sum((t - expected) ** 2 * mass for t, mass in masses.items())
    assert abs(sum(draws) / STEPS - expected) <= 5 * math.sqrt(variance / STEPS)
    assert mean - 0.35 <= expected <= mean


def test_draws_depend_on_seed_and_step_alone() -> None:
    config = spider_config(num_loops=6, sample_loops="poisson")
    first = [draw_loops(config, 1, step) for step in range(100)]
    torch.manual_seed(99)
    assert first == [draw_loops(config, 1, step) for step in range(100)]
    assert first != [draw_loops(config, 2, step) for step in range(100)]
    # What the function returns is part of a run: a change of it would break the resume of one.
    assert first[:12] == [9, 11, 9, 4, 8, 6, 6, 5, 5, 5, 7, 5]
    fixed = spider_config(num_loops=6)
    assert {draw_loops(fixed, seed, step) for seed, step in itertools.product(range(3), range(20))} == {6}
    assert max_loops(fixed) == 6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backprop_loops": -1}, "backprop_loops = -1 must be at least 1, or 0"),
        ({"max_sampled_loops": 4}, 'bounds a draw, but sample_loops = "none"'),
        ({"max_sampled_loops": 2, "sample_loops": "poisson"}, "must be at least num_loops = 3"),
    ],
)
def test_mistakes(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        spider_config(**changes)


class Expected(NamedTuple):
    """The parts of the core's output that have gradients."""

    r: Tensor
    ponder: Tensor
    router: Any


def detached_core(core: RecurrentCore, inputs: dict[str, Any], num_loops: int, last: int) -> Expected:
    """The loop with every result of the earlier loops detached by hand, all of them computed with gradients."""
    z = h = inputs["z_BSD"]
    states, probs, stats = [], [], []
    for t in range(num_loops):
        index = torch.tensor(min(t, core.num_loops - 1))
        y = core.input_norm(h + z + core.loop_embedding(index))
        found = []
        for number, layer in enumerate(core.layers):
            y = y + core.engram_gates[str(number)](y, inputs["memories"][str(number)], inputs["conv_mask"])
            y, layer_stats = layer(y, inputs["rotary"], inputs["mask"], inputs["filled_BS"])
            found.append(layer_stats)
        y = y + core.adapter(y, index)
        h = core.injection(h, z, y)
        p = torch.sigmoid(h @ core.halt_predictor.weight[0] + core.halt_predictor.bias)
        if t < num_loops - last:
            h, p = h.detach(), p.detach()
            found = [type(one)(*(part.detach() for part in one)) for one in found]
        states.append(h)
        probs.append(p)
        stats += found
    weights = act_weights(torch.stack(probs), core.act_epsilon)
    r = sum(weight[..., None] * state for weight, state in zip(weights, states, strict=True))
    loops = torch.arange(1, num_loops + 1)[:, None, None]
    router = type(stats[0])(*map(torch.stack, zip(*stats, strict=True)))
    return Expected(r, (weights * loops).sum(0), router)


def gradients(core: nn.Module, inputs: dict[str, Any], out: CoreOutput | Expected) -> dict[str, Tensor | None]:
    """Of a loss that everything the core returns is in."""
    core.zero_grad()
    inputs["z_BSD"].grad = None
    noise = torch.randn(out.r.shape, generator=torch.Generator().manual_seed(3))
    (out.r * noise).sum().add(out.ponder.sum() + out.router.probs_BE.square().sum() + out.router.z_B.sum()).backward()
    found = {name: parameter.grad for name, parameter in core.named_parameters()}
    return {**found, "z": inputs["z_BSD"].grad}


@pytest.mark.parametrize(("num_loops", "last"), [(3, 1), (3, 2), (5, 2), (2, 2), (1, 1), (2, 4)])
def test_truncation_is_detaching_the_earlier_loops(num_loops: int, last: int) -> None:
    core = RecurrentCore(spider_config(num_loops=3, backprop_loops=last))
    enliven(core)
    with torch.no_grad():
        # So that positions halt at different loops, some before the gradient begins.
        core.halt_predictor.weight.mul_(0.3)
    inputs = core_inputs()
    inputs["z_BSD"].requires_grad_()
    out, expected = core(**inputs, num_loops=num_loops), detached_core(core, inputs, num_loops, last)
    torch.testing.assert_close(out.r, expected.r)
    wanted = {name: None if grad is None else grad.clone() for name, grad in gradients(core, inputs, expected).items()}
    mine = gradients(core, inputs, out)
    for name, grad in wanted.items():
        assert grad is not None, name
        torch.testing.assert_close(mine[name], grad, rtol=1e-4, atol=1e-5 * float(grad.abs().max()), msg=name)


def test_truncation_changes_gradients_and_no_value() -> None:
    batch = Batch(packed_rows(), next_ids(packed_rows()))
    context = StepContext(batch.num_targets)
    losses, grads = [], []
    for last in (0, 3, 1):
        model = lively_spider(backprop_loops=last).train()
        terms = spider_loss(model, batch, context)
        terms.total.backward()
        losses.append(terms.total.detach())
        grads.append(model.core.layers[0].moe.up_proj.weight.grad.clone())
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])
    assert torch.equal(grads[0], grads[1])
    assert not torch.allclose(grads[0], grads[2], rtol=0.01)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_and_truncation_go_together(mode: Any) -> None:
    batch = Batch(packed_rows(), next_ids(packed_rows()))
    spec, grads = get_model_spec("spider"), []
    for how in ("none", mode):
        with imagine_world(ParallelismConfig(), 1) as world:
            context = PluginContext(world.mesh, activation_checkpoint=ActivationCheckpointConfig(mode=how))
            model = activation_checkpoint.apply(lively_spider(backprop_loops=2).train(), spec, context)
        spec.loss(model, batch, StepContext(batch.num_targets, num_loops=4)).total.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*grads, strict=True):
        assert torch.equal(plain, recomputed)


def test_a_step_runs_the_loops_of_its_context() -> None:
    batch = Batch(packed_rows(), next_ids(packed_rows()))
    model = lively_spider()
    context = StepContext(batch.num_targets)
    own = spider_loss(model, batch, context).total
    assert torch.equal(own, spider_loss(model, batch, replace(context, num_loops=3)).total)
    assert not torch.allclose(own, spider_loss(model, batch, replace(context, num_loops=1)).total)


def test_the_ponder_cost_is_the_mean_of_the_expected_loops() -> None:
    batch = Batch(packed_rows(), next_ids(packed_rows()))
    context = StepContext(batch.num_targets)
    free, costly = (lively_spider(act_ponder_weight=weight).train() for weight in (0.0, 0.5))
    out = free(batch.input_ids)
    rows = [out.ponder[row, out.filled[row]].detach().mean() for row in range(4)]
    targets = (batch.targets < 256 + 16) & (batch.targets != 256)
    expected = sum(float(mean) * int(count) for mean, count in zip(rows, targets.sum(-1), strict=True))
    terms = [spider_loss(model, batch, context) for model in (free, costly)]
    difference = float(terms[1].total.detach() - terms[0].total.detach())
    assert difference == pytest.approx(0.5 * expected / batch.num_targets, rel=1e-4)
    # With nothing but the cost to follow, a step down the gradient makes positions halt earlier.
    costly.zero_grad()
    out = costly(batch.input_ids)
    (out.ponder * out.filled).sum().backward()
    bias = costly.core.halt_predictor.bias
    assert float(bias.grad) < 0


def test_models_without_loops_say_so() -> None:
    assert get_model_spec("byte_transformer").draw_loops is None
    assert get_model_spec("byte_transformer").max_loops is None
