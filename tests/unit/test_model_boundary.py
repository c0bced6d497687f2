"""Where segments end: selection in both modes, capacity, the rules that move the bias."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spider_titan.models.spider.boundary import BoundaryPredictor, Selection, rate_quantile, select_boundaries
from spider_titan.vocabulary import BOS_ID, EOS_ID, PAD_ID

from .reference.tiny import lively_spider, packed_rows, spider_config

RATE = 1 / 3.3


def select(
    logits: Tensor, ids: Tensor, mode: str = "threshold", *, bias: float = 0.0, capacity: int = 10**6
) -> Selection:
    return select_boundaries(logits, torch.tensor(bias), ids, mode=mode, rate=RATE, capacity=capacity)


def bytes_and(num_bytes: int, *, length: int, ends: tuple[int, ...] = ()) -> Tensor:
    """One row of ``num_bytes`` real ids, EOS at ``ends``, PAD to ``length``."""
    ids = torch.full((1, length), PAD_ID)
    ids[0, :num_bytes] = ord("x")
    ids[0, list(ends)] = EOS_ID
    return ids


@pytest.mark.parametrize("num_bytes", [0, 1, 3, 4, 10, 33, 34, 63, 66, 330, 512])
@pytest.mark.parametrize("padding", [0, 7])
def test_topk_takes_the_largest_within_the_budget(num_bytes: int, padding: int) -> None:
    torch.manual_seed(num_bytes)
    ids = bytes_and(num_bytes, length=max(1, num_bytes + padding))
    logits = torch.randn(ids.shape) * 3
    selected = select(logits, ids, "topk").selected[0]
    budget = num_bytes * 10 // 33
    largest = sorted(range(num_bytes), key=lambda at: -float(logits[0, at]))[:budget]
    assert selected.nonzero().flatten().tolist() == sorted(largest)


def test_topk_counts_ends_in_the_budget() -> None:
    ids = bytes_and(33, length=40, ends=(3, 4, 20))
    logits = torch.linspace(5, -5, 40)[None]
    selected = select(logits, ids, "topk").selected[0].nonzero().flatten().tolist()
    assert selected == [0, 1, 2, 3, 4, 5, 6, 7, 8, 20]
    assert len(selected) == 10


def test_more_ends_than_the_budget_are_all_boundaries() -> None:
    ids = bytes_and(10, length=12, ends=(0, 2, 4, 6, 8))
    selected = select(torch.randn(1, 12), ids, "topk").selected[0]
    assert selected.nonzero().flatten().tolist() == [0, 2, 4, 6, 8]


def test_equal_logits_select_exactly_the_budget() -> None:
    ids = bytes_and(66, length=66)
    assert int(select(torch.zeros(1, 66), ids, "topk").selected.sum()) == 20


@pytest.mark.parametrize("mode", ["topk", "threshold"])
@pytest.mark.parametrize("logit", [-1e4, 1e4])
def test_an_end_always_closes_and_padding_never(mode: str, logit: float) -> None:
    ids = packed_rows()
    selection = select(torch.full(ids.shape, logit), ids, mode)
    assert selection.boundaries[ids == EOS_ID].all()
    assert not selection.boundaries[ids == PAD_ID].any()
    assert not selection.free[(ids == EOS_ID) | (ids == PAD_ID)].any()
    assert selection.free[ids == BOS_ID].all()


@pytest.mark.parametrize("bias", [-1.5, 0.0, 2.5])
def test_threshold_is_p_above_one_half_with_the_bias(bias: float) -> None:
    ids = bytes_and(64, length=64)
    logits = torch.linspace(-4, 4, 64)[None]
    selection = select(logits, ids, bias=bias)
    assert selection.selected[0].tolist() == [1 / (1 + math.exp(-(x + bias))) > 0.5 for x in logits[0].tolist()]
    torch.testing.assert_close(selection.probs, torch.sigmoid(logits + bias))


def test_the_bias_does_not_change_what_topk_selects() -> None:
    ids, logits = packed_rows(), torch.randn(4, 64)
    assert torch.equal(select(logits, ids, "topk", bias=9.0).selected, select(logits, ids, "topk").selected)


@pytest.mark.parametrize("capacity", [0, 1, 5, 12])
def test_boundaries_beyond_the_capacity_are_dropped_from_the_right(capacity: int) -> None:
    ids, logits = packed_rows(), torch.randn(4, 64)
    selection = select(logits, ids, capacity=capacity)
    for selected, kept in zip(selection.selected, selection.boundaries, strict=True):
        asked = selected.nonzero().flatten().tolist()
        assert kept.nonzero().flatten().tolist() == asked[:capacity]


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'top_k'.*'topk' or 'threshold'"):
        select(torch.zeros(1, 4), bytes_and(4, length=4), "top_k")


@pytest.mark.parametrize(("rate", "slots"), [(0.34, 23), (0.45, 30), (0.25, 17), (1.0, 65)])
def test_the_number_of_slots_is_static(rate: float, slots: int) -> None:
    model = lively_spider()
    for bias in (-30.0, 0.0, 30.0):
        model.boundary_predictor.bias.fill_(bias)
        assert model(packed_rows(), max_boundary_rate=rate).filled.shape == (4, slots)


def test_the_predictor_computes_in_fp32_under_bfloat16() -> None:
    model = lively_spider().bfloat16()
    predictor = model.boundary_predictor.float()
    out = model(packed_rows())
    assert out.logits.dtype == torch.bfloat16
    assert out.raw_boundary_logits.dtype == out.selection.probs.dtype == torch.float32
    x = torch.randn(2, 8, 32).bfloat16()
    exact = predictor(x.float())
    assert torch.equal(predictor(x), exact)
    assert not torch.equal(exact, exact.bfloat16().float())


def test_the_predictor_is_a_norm_and_a_two_layer_mlp() -> None:
    predictor = lively_spider().boundary_predictor
    x = torch.randn(3, 32)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * predictor.norm.weight
    hidden = normed @ predictor.hidden.weight.T + predictor.hidden.bias
    activated = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    expected = activated @ predictor.output.weight[0] + predictor.output.bias
    torch.testing.assert_close(predictor(x), expected, rtol=1e-4, atol=1e-4)


def new_predictor(**changes: float) -> BoundaryPredictor:
    predictor = BoundaryPredictor(spider_config(**changes))
    predictor.init_buffers()
    return predictor


def test_quantile_splits_a_row_at_the_rate() -> None:
    torch.manual_seed(1)
    ids = bytes_and(330, length=400, ends=(10, 200, 329))
    logits = torch.randn(1, 400) * 3 + 1
    selection = select(logits, ids)
    quantile, weight = rate_quantile(logits, selection, RATE)
    assert weight.tolist() == [330.0]
    above = (logits > quantile) & (ids == ord("x"))
    assert int(above.sum()) + 3 == 100


def test_rows_without_a_free_choice_have_no_weight() -> None:
    ids = torch.cat((bytes_and(0, length=12), bytes_and(12, length=12, ends=tuple(range(12)))))
    logits = torch.randn(2, 12)
    quantile, weight = rate_quantile(logits, select(logits, ids), RATE)
    assert weight.tolist() == [0.0, 0.0]
    assert quantile.tolist() == [0.0, 0.0]


def test_a_short_row_has_a_finite_quantile() -> None:
    for num_bytes in range(1, 8):
        logits = torch.randn(1, 8)
        quantile, _ = rate_quantile(logits, select(logits, bytes_and(num_bytes, length=8)), RATE)
        assert torch.isfinite(quantile).all()


def test_following_the_quantile_gives_threshold_the_target_rate() -> None:
    torch.manual_seed(2)
    predictor = new_predictor()
    ids = bytes_and(660, length=660).expand(4, -1)
    logits = torch.randn(4, 660) * 2 - 5
    for _ in range(200):
        quantile, weight = rate_quantile(logits, select(logits, ids), RATE)
        predictor.follow_quantile((quantile * weight).sum() / weight.sum())
    rate = select(logits, ids, bias=float(predictor.bias)).selected.float().mean()
    assert abs(float(rate) - RATE) < 0.01


def test_one_step_after_the_quantile() -> None:
    predictor = new_predictor(boundary_bias_decay=0.9)
    predictor.follow_quantile(torch.tensor(3.0))
    torch.testing.assert_close(predictor.bias, torch.tensor(-0.3))
    predictor.follow_quantile(torch.tensor(-1.0))
    torch.testing.assert_close(predictor.bias, torch.tensor(-0.3 * 0.9 + 0.1))


@pytest.mark.parametrize(("spread", "unit"), [(0.0, 1.0), (0.7, 1.0), (6.0, 6.0)])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.6, 1.0])
def test_drift_is_countered_by_gain_times_the_average_deviation(rate: float, spread: float, unit: float) -> None:
    predictor = new_predictor(boundary_bias_decay=0.8, boundary_bias_gain=0.5)
    average, bias = RATE, 0.0
    for _ in range(3):
        predictor.counter_drift(torch.tensor(rate), torch.tensor(spread))
        average = 0.8 * average + 0.2 * rate
        bias += unit * 0.5 * (RATE - average)
    assert float(predictor.bias) == pytest.approx(bias, rel=1e-5)
    assert (float(predictor.bias) > 0) is (rate < RATE)


def test_no_gain_no_move() -> None:
    predictor = new_predictor(boundary_bias_gain=0.0)
    predictor.counter_drift(torch.tensor(0.9), torch.tensor(1.0))
    assert float(predictor.bias) == 0.0
