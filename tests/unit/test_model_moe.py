"""SharedProjectionMoE against a loop over tokens and experts, in value and gradient; dispatch and statistics."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spider_titan.models.spider.losses import load_balance
from spider_titan.models.spider.moe import GROUP_ALIGNMENT, RouterStats, SharedProjectionMoE, dispatch

from .reference.moe import MoEWeights, moe_token, softmax
from .reference.tiny import enliven, spider_config


def lively_moe(num_experts: int, top_k: int) -> SharedProjectionMoE:
    moe = SharedProjectionMoE(spider_config(num_experts=num_experts, experts_per_token=top_k))
    enliven(moe)
    moe.router.balance_bias.zero_()
    return moe


def exact_weights(moe: SharedProjectionMoE) -> MoEWeights:
    parameters = (moe.router.weight, moe.up_proj.weight, moe.W_gate, moe.W_transform, moe.down_proj.weight)
    return MoEWeights(*(parameter.detach().double().requires_grad_() for parameter in parameters))


def steer(moe: SharedProjectionMoE, experts: tuple[int, ...]) -> None:
    moe.router.balance_bias[list(experts)] = 10.0


STEERED = [(4, 2, ()), (8, 1, ()), (5, 3, ()), (1, 1, ()), (4, 4, ()), (4, 1, (2,)), (4, 2, (0, 1)), (4, 2, (2, 3))]


@pytest.mark.parametrize("shape", [(2, 19), (1, 1), (3, 40)])
@pytest.mark.parametrize(("num_experts", "top_k", "steered"), STEERED)
def test_equals_a_loop(num_experts: int, top_k: int, steered: tuple[int, ...], shape: tuple[int, int]) -> None:
    """Steered: all tokens to the same experts, none to the others."""
    moe = lively_moe(num_experts, top_k)
    steer(moe, steered)
    torch.manual_seed(0)
    x = torch.randn(*shape, 32, requires_grad=True)
    output_grad = torch.randn(*shape, 32)
    out, stats = moe(x, torch.ones(shape, dtype=torch.bool))
    (out * output_grad).sum().backward()

    weights, x_ref = exact_weights(moe), x.detach().double().requires_grad_()
    results = [moe_token(token, weights, top_k, moe.router.balance_bias) for token in x_ref.flatten(0, 1)]
    expected = torch.stack([value for value, _ in results]).view_as(x_ref)
    (expected * output_grad).sum().backward()

    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), x_ref.grad, rtol=1e-4, atol=1e-5)
    parameters = (moe.router.weight, moe.up_proj.weight, moe.W_gate, moe.W_transform, moe.down_proj.weight)
    for parameter, reference in zip(parameters, weights, strict=True):
        torch.testing.assert_close(parameter.grad.double(), reference.grad, rtol=1e-4, atol=1e-5)
    chosen = [expert for _, experts in results for expert in experts]
    assert stats.load_BE.sum(0).tolist() == [chosen.count(expert) for expert in range(num_experts)]
    if steered:
        assert set(chosen) == set(steered)


@pytest.mark.parametrize("num_assignments", [1, 2, 15, 16, 17, 100])
@pytest.mark.parametrize("num_experts", [1, 4, 32])
@pytest.mark.parametrize("kind", ["random", "all to the first", "all to the last", "every expert in turn"])
def test_dispatch_places_every_assignment_in_its_experts_group(
    num_assignments: int, num_experts: int, kind: str
) -> None:
    torch.manual_seed(num_assignments)
    experts = {
        "random": torch.randint(num_experts, (num_assignments,)),
        "all to the first": torch.zeros(num_assignments, dtype=torch.int64),
        "all to the last": torch.full((num_assignments,), num_experts - 1),
        "every expert in turn": torch.arange(num_assignments) % num_experts,
    }[kind]
    rows, ends, num_rows = dispatch(experts, num_experts)
    begins = [0, *ends.tolist()[:-1]]
    assert len(set(rows.tolist())) == num_assignments
    for row, expert in zip(rows.tolist(), experts.tolist(), strict=True):
        assert begins[expert] <= row < ends[expert]
    assert all(begin % GROUP_ALIGNMENT == 0 for begin in begins)
    assert begins == sorted(begins)
    assert ends[-1] == num_rows == dispatch(torch.zeros_like(experts), num_experts)[2]
    assert num_rows % GROUP_ALIGNMENT == 0


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_does_not_depend_on_what_others_choose(dtype: torch.dtype, num_threads: int) -> None:
    """Bit for bit: the sizes of the groups change with the other tokens, the token's result does not."""
    moe, filled = lively_moe(4, 2).to(dtype), torch.ones(1, 50, dtype=torch.bool)
    torch.manual_seed(1)
    x = torch.randn(1, 50, 32, dtype=dtype)
    loads = set()
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        first = moe(x, filled)[0][:, :5]
        for seed in range(6):
            torch.manual_seed(seed)
            others = torch.cat((x[:, :5], torch.randn(1, 45, 32, dtype=dtype) * seed), dim=1)
            out, stats = moe(others, filled)
            loads.add(tuple(stats.load_BE[0].tolist()))
            assert torch.equal(out[:, :5], first)
    finally:
        torch.set_num_threads(threads_before)
    assert len(loads) > 3


def test_statistics_count_filled_slots_only() -> None:
    moe = lively_moe(4, 2)
    torch.manual_seed(2)
    x, filled = torch.randn(3, 12, 32), torch.rand(3, 12) > 0.5
    filled[2] = False
    _, stats = moe(x, filled)
    weights = exact_weights(moe)
    for row in range(3):
        load, probs, z = torch.zeros(4), torch.zeros(4), 0.0
        for slot in filled[row].nonzero().flatten().tolist():
            token = x[row, slot].double()
            load[moe_token(token, weights, 2, torch.zeros(4))[1]] += 1
            probs += softmax(weights.router @ token).detach().float()
            z += float((weights.router.detach() @ token).exp().sum().log() ** 2)
        torch.testing.assert_close(stats.load_BE[row], load)
        torch.testing.assert_close(stats.probs_BE[row], probs)
        torch.testing.assert_close(stats.z_B[row], torch.tensor(z))
    _, same = moe(x.where(filled[..., None], 1e3), filled)
    for mine, theirs in zip(stats, same, strict=True):
        torch.testing.assert_close(mine, theirs)


def stats_of(load: list[list[float]], probs: list[list[float]]) -> RouterStats:
    """One layer and loop of a row for each entry."""
    return RouterStats(torch.tensor(load)[None], torch.tensor(probs)[None], torch.zeros(1, len(load)))


def test_load_balance_is_one_where_even_and_the_number_of_experts_at_worst() -> None:
    segments = torch.tensor([8, 8, 0])
    stats = stats_of([[4.0] * 4, [8.0, 8.0, 0.0, 0.0], [0.0] * 4], [[2.0] * 4, [4.0, 4.0, 0.0, 0.0], [0.0] * 4])
    torch.testing.assert_close(load_balance(stats, segments, 2), torch.tensor([1.0, 2.0, 0.0]))
    worst = stats_of([[8.0, 0.0, 0.0, 0.0]], [[8.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(load_balance(worst, torch.tensor([8]), 1), torch.tensor([4.0]))


def test_load_balance_is_averaged_over_layers_and_loops() -> None:
    load, probs = torch.rand(6, 2, 4), torch.rand(6, 2, 4)
    segments = torch.tensor([5, 9])
    actual = load_balance(RouterStats(load, probs, torch.zeros(6, 2)), segments, 2)
    for row in range(2):
        per_layer = [
            4
            * sum(
                float(load[i, row, e]) / (2 * segments[row]) * float(probs[i, row, e]) / segments[row] for e in range(4)
            )
            for i in range(6)
        ]
        assert float(actual[row]) == pytest.approx(float(sum(per_layer)) / 6, rel=1e-5)


def route(moe: SharedProjectionMoE, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, experts, _ = moe.router(x, torch.ones(x.shape[:2], dtype=torch.bool))
    return weights, experts


def test_the_balance_bias_moves_the_selection_and_not_the_weights() -> None:
    moe = lively_moe(4, 2)
    torch.manual_seed(3)
    x = torch.randn(2, 30, 32)
    _, before = route(moe, x)
    steer(moe, (3,))
    weights, after = route(moe, x)
    assert not torch.equal(before, after)
    assert (after == 3).any(-1).all()
    probs = (x @ moe.router.weight.T).softmax(-1).gather(-1, after)
    torch.testing.assert_close(weights, probs / probs.sum(-1, keepdim=True))


def test_balance_moves_towards_idle_experts() -> None:
    moe = lively_moe(4, 2)
    moe.router.balance(torch.tensor([10.0, 0.0, 4.0, 2.0]), 0.01)
    torch.testing.assert_close(moe.router.balance_bias, torch.tensor([-0.01, 0.01, 0.0, 0.01]))


def test_the_router_computes_in_fp32_under_bfloat16() -> None:
    moe = lively_moe(4, 2).bfloat16()
    x = torch.randn(1, 20, 32).bfloat16()
    weights, experts = route(moe, x)
    probs = (x.float() @ moe.router.weight.float().T).softmax(-1)
    assert weights.dtype == torch.float32
    assert torch.equal(experts, probs.topk(2).indices)
    out, _ = moe(x, torch.ones(1, 20, dtype=torch.bool))
    assert out.dtype == torch.bfloat16
