"""Loss terms against exact arithmetic; what a loss must not depend on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spider_titan.models.common.losses import language_model_metrics, language_model_sums
from spider_titan.models.spider.boundary import Selection, select_boundaries
from spider_titan.models.spider.losses import binomial_nll, boundary_loss, hinge, straight_through_count
from spider_titan.spec import Batch, LossTerms, StepContext, get_model_spec
from spider_titan.vocabulary import EOS_ID, PAD_ID

from .reference.tiny import (
    byte_transformer_config,
    document,
    lively_model,
    lively_spider,
    next_ids,
    packed_rows,
    row,
    spider_config,
)

SPIDER = get_model_spec("spider")
RATE = 1 / 3.3

COUNTS = [(1, 0), (1, 1), (2, 1), (33, 10), (33, 0), (33, 33), (100, 31), (2048, 600), (2048, 621), (2048, 2048)]
LARGE_COUNTS = [(262_144, 79_437), (262_144, 100_000)]


def exact_nll(n: int, k: int) -> float:
    """-log Binomial(n, 10/33)(k) / n: the coefficient as an exact integer."""
    return -(math.log(math.comb(n, k)) + k * math.log(10 / 33) + (n - k) * math.log(23 / 33)) / n


@pytest.mark.parametrize(("n", "k"), COUNTS)
def test_binomial_equals_exact_integers(n: int, k: int) -> None:
    actual = binomial_nll(torch.tensor([float(k)]), torch.tensor([n]), RATE)
    assert actual.dtype == torch.float32
    assert float(actual) == pytest.approx(exact_nll(n, k), rel=1e-6, abs=1e-9)


def test_binomial_of_a_row_without_bytes_is_zero() -> None:
    count = torch.zeros(1, requires_grad=True)
    nll = binomial_nll(count, torch.tensor([0]), RATE)
    nll.sum().backward()
    assert nll.item() == 0.0
    assert torch.isfinite(count.grad).all()


@pytest.mark.parametrize(("n", "k"), COUNTS[3:4] + COUNTS[6:9] + LARGE_COUNTS)
def test_binomial_gradient_equals_finite_differences(n: int, k: int) -> None:
    """Along the gamma function, which continues the factorials."""
    count = torch.tensor([float(k)], requires_grad=True)
    binomial_nll(count, torch.tensor([n]), RATE).sum().backward()

    def log_likelihood(x: float) -> float:
        return -math.lgamma(x + 1) - math.lgamma(n - x + 1) + x * math.log(10 / 33) + (n - x) * math.log(23 / 33)

    slope = (log_likelihood(k + 0.05) - log_likelihood(k - 0.05)) / 0.1
    assert float(count.grad) == pytest.approx(-slope / n, rel=1e-3, abs=1e-5 / n)


def test_binomial_pulls_towards_the_target_rate() -> None:
    count = torch.tensor([10.0, 100.0], requires_grad=True)
    binomial_nll(count, torch.tensor([100, 200]), RATE).sum().backward()
    assert count.grad[0] < 0 < count.grad[1]


def test_hinge_is_free_within_its_band() -> None:
    n = torch.tensor([400, 400, 400, 400])
    count = torch.tensor([100.0, 130.0, 40.0, 121.0], requires_grad=True)
    std = math.sqrt(RATE * (1 - RATE) / 400)
    loss = hinge(count, n, RATE, 3.0)
    below = RATE - 3 * std
    assert 40 / 400 < below < 100 / 400 < 121 / 400 < RATE < 130 / 400
    torch.testing.assert_close(loss, torch.tensor([0.0, 130 / 400 - RATE, below - 0.1, 0.0]))
    loss.sum().backward()
    torch.testing.assert_close(count.grad, torch.tensor([0.0, 1 / 400, -1 / 400, 0.0]))


def selection_of(logits: Tensor, ids: Tensor, mode: str) -> Selection:
    return select_boundaries(logits, torch.tensor(0.3), ids, mode=mode, rate=RATE, capacity=1000)


def test_count_is_exact_with_the_gradient_of_free_probabilities() -> None:
    ids = packed_rows()
    torch.manual_seed(0)
    logits = torch.randn(ids.shape, requires_grad=True)
    selection = selection_of(logits, ids, "threshold")
    count = straight_through_count(selection)
    assert count.tolist() == selection.selected.sum(-1).tolist()
    count.sum().backward()
    p = torch.sigmoid(logits.detach() + 0.3)
    free = (ids != PAD_ID) & (ids != EOS_ID)
    torch.testing.assert_close(logits.grad, p * (1 - p) * free)


@pytest.mark.parametrize("target", ["selection", "rate"])
@pytest.mark.parametrize("mode", ["topk", "threshold"])
def test_fixed_loss_is_bce_on_free_bytes_plus_the_binomial(target: str, mode: str) -> None:
    ids = packed_rows()
    torch.manual_seed(1)
    selection = selection_of(torch.randn(ids.shape), ids, mode)
    config = spider_config(boundary_fixed_target=target, boundary_binomial_weight=0.1)
    actual = boundary_loss(selection, config, "fixed")
    for index, row_ids in enumerate(ids.tolist()):
        terms = []
        for at, id_ in enumerate(row_ids):
            if id_ not in (PAD_ID, EOS_ID):
                p = 1 / (1 + math.exp(-float(selection.logits[index, at])))
                goal = float(selection.selected[index, at]) if target == "selection" else RATE
                terms.append(-goal * math.log(p) - (1 - goal) * math.log(1 - p))
        num_bytes = sum(id_ != PAD_ID for id_ in row_ids)
        prior = exact_nll(num_bytes, int(selection.selected[index].sum()))
        assert float(actual[index]) == pytest.approx(sum(terms) / len(terms) + 0.1 * prior, rel=1e-5)


def test_adaptive_loss_is_the_chosen_prior_only() -> None:
    ids = packed_rows()
    selection = selection_of(torch.randn(ids.shape), ids, "threshold")
    count, num_bytes = selection.selected.sum(-1).float(), (ids != PAD_ID).sum(-1)
    binomial = boundary_loss(selection, spider_config(), "adaptive")
    torch.testing.assert_close(binomial, 0.1 * binomial_nll(count, num_bytes, RATE))
    config = spider_config(boundary_adaptive_loss="hinge", boundary_hinge_width=1.0)
    torch.testing.assert_close(boundary_loss(selection, config, "adaptive"), 0.1 * hinge(count, num_bytes, RATE, 1.0))


def test_large_logits_have_gradients() -> None:
    """The loss is computed from logits: from a probability of 1 in fp32 no gradient comes."""
    ids = torch.full((1, 40), 97)
    logits = torch.full((1, 40), 30.0, requires_grad=True)
    boundary_loss(selection_of(logits, ids, "topk"), spider_config(), "fixed").sum().backward()
    assert (logits.grad[0, 20:] > 0.01).all()


def test_lm_sums_equal_a_loop() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 9, 272) * 3
    targets = torch.randint(0, 256, (2, 9))
    targets[0, 5:], targets[1, 0], targets[1, 3] = PAD_ID, EOS_ID, 270
    sums = language_model_sums(logits, targets)
    nats, byte_nats, count, byte_count = 0.0, 0.0, 0, 0
    for scores, target in zip(logits.double().flatten(0, 1).tolist(), targets.flatten().tolist(), strict=True):
        if target == PAD_ID:
            continue
        peak = max(scores)
        value = peak + math.log(sum(math.exp(score - peak) for score in scores)) - scores[target]
        nats, count = nats + value, count + 1
        if target < 256:
            byte_nats, byte_count = byte_nats + value, byte_count + 1
    assert (float(sums["num_targets"]), float(sums["num_byte_targets"])) == (count, byte_count) == (14, 12)
    assert float(sums["lm_nats"]) == pytest.approx(nats, rel=1e-6)
    metrics = language_model_metrics(sums)
    assert metrics["lm_loss"] == pytest.approx(nats / count, rel=1e-6)
    assert metrics["bpb"] * math.log(2) == pytest.approx(byte_nats / byte_count, rel=1e-6)


def test_lm_loss_is_fp32_under_bfloat16() -> None:
    logits, targets = torch.randn(1, 50, 272).bfloat16(), torch.randint(0, 256, (1, 50))
    exact = language_model_sums(logits.float(), targets)["lm_nats"]
    assert torch.equal(language_model_sums(logits, targets)["lm_nats"], exact)


def batch_of(ids: Tensor) -> Batch:
    return Batch(ids, next_ids(ids))


def padded(ids: Tensor) -> Tensor:
    return torch.cat((ids, torch.full_like(ids[:1], PAD_ID)))


CONTEXTS = {
    "fixed, topk": {"boundary_mode": "topk", "boundary_phase": "fixed", "max_boundary_rate": 0.34},
    "fixed, threshold": {"boundary_mode": "threshold", "boundary_phase": "fixed", "max_boundary_rate": 0.34},
    "adaptive": {"boundary_phase": "adaptive", "max_boundary_rate": 0.45},
    "frozen": {"boundary_mode": "topk", "boundary_phase": "fixed", "frozen_groups": frozenset({"boundary_predictor"})},
}
ALL_TERMS = {"router_z_weight": 0.1, "act_ponder_weight": 0.2, "router_aux_weight": 0.3, "boundary_weight": 0.7}


def loss_and_gradients(model: nn.Module, batches: list[Batch], settings: dict[str, Any]) -> tuple[float, list[Tensor]]:
    model.zero_grad()
    context = StepContext(num_targets=sum(batch.num_targets for batch in batches) or 1, **settings)
    total = 0.0
    for batch in batches:
        terms = SPIDER.loss(model, batch, context)
        terms.total.backward()
        total += float(terms.total.detach())
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return total, grads


def assert_same_gradients(actual: list[Tensor], expected: list[Tensor]) -> None:
    scale = max(float(grad.abs().max()) for grad in expected)
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6 * scale)


@pytest.mark.parametrize("phase", CONTEXTS)
@pytest.mark.parametrize("split", [(1, 1, 1, 1), (1, 3), (3, 1)], ids=str)
def test_micro_batches_sum_to_the_whole(phase: str, split: tuple[int, ...]) -> None:
    """The global batch may be cut anywhere, in micro-batches as in ranks: values and gradients add up."""
    model = lively_spider(**ALL_TERMS)
    ids = packed_rows()
    whole, expected = loss_and_gradients(model, [batch_of(ids)], CONTEXTS[phase])
    parts, actual = loss_and_gradients(model, [batch_of(part) for part in ids.split(split)], CONTEXTS[phase])
    assert parts == pytest.approx(whole, rel=1e-5)
    assert_same_gradients(actual, expected)


@pytest.mark.parametrize("phase", CONTEXTS)
def test_a_row_of_padding_changes_nothing(phase: str) -> None:
    model = lively_spider(**ALL_TERMS)
    ids = packed_rows()
    without, expected = loss_and_gradients(model, [batch_of(ids)], CONTEXTS[phase])
    with_padding, actual = loss_and_gradients(model, [batch_of(padded(ids))], CONTEXTS[phase])
    assert with_padding == pytest.approx(without, rel=1e-5)
    assert_same_gradients(actual, expected)


@pytest.mark.parametrize("phase", CONTEXTS)
def test_a_batch_of_padding_is_zero_with_zero_gradients(phase: str) -> None:
    model = lively_spider(**ALL_TERMS)
    total, grads = loss_and_gradients(model, [batch_of(torch.full((2, 64), PAD_ID))], CONTEXTS[phase])
    assert total == 0.0
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


ODD_ROWS = {
    "no boundary": ([97] * 64, -30.0),
    "a boundary at each byte": ([97] * 64, 30.0),
    "one byte": ([97] + [PAD_ID] * 63, 0.0),
    "only ends": ([EOS_ID] * 64, 0.0),
    "tiny documents": (row(*[document(0, 1)] * 32), 0.0),
}


@pytest.mark.parametrize("gradient", ["confidence", "cumsum", "none"])
@pytest.mark.parametrize("what", ODD_ROWS)
def test_odd_rows_have_finite_losses_and_gradients(what: str, gradient: str) -> None:
    ids, bias = ODD_ROWS[what]
    model = lively_spider(boundary_gradient=gradient, **ALL_TERMS)
    model.boundary_predictor.bias.fill_(bias)
    for settings in CONTEXTS.values():
        total, grads = loss_and_gradients(model, [batch_of(torch.tensor([ids]))], settings)
        assert math.isfinite(total)
        assert all(torch.isfinite(grad).all() for grad in grads)


def spider_terms(phase: str, **changes: Any) -> tuple[nn.Module, Batch, LossTerms]:
    model = lively_spider(**changes)
    batch = batch_of(packed_rows())
    return model, batch, SPIDER.loss(model, batch, StepContext(num_targets=batch.num_targets, **CONTEXTS[phase]))


@pytest.mark.parametrize("phase", CONTEXTS)
def test_the_total_is_its_weighted_terms(phase: str) -> None:
    """Row terms, weighted by the row's targets, from the model's own output."""
    model, batch, terms = spider_terms(phase, **ALL_TERMS)
    settings = CONTEXTS[phase]
    out = model(
        batch.input_ids,
        settings.get("boundary_mode", "threshold"),
        max_boundary_rate=settings.get("max_boundary_rate", 1.0),
    )
    nats = nn.functional.cross_entropy(
        out.logits.flatten(0, 1), batch.targets.flatten(), ignore_index=PAD_ID, reduction="sum"
    )
    expected = nats.item()
    boundary = boundary_loss(out.selection, model.config, settings["boundary_phase"])
    for index in range(4):
        segments = int(out.filled[index].sum())
        load, probs = out.router.load_BE[:, index] / (2 * segments), out.router.probs_BE[:, index] / segments
        value = 0.3 * 4 * (load * probs).sum(-1).mean()
        value += 0.1 * out.router.z_B[:, index].mean() / segments
        value += 0.2 * out.ponder[index][out.filled[index]].mean()
        if phase != "frozen":
            value += 0.7 * boundary[index]
        expected += value.item() * int((batch.targets[index] != PAD_ID).sum())
    assert terms.total.item() == pytest.approx(expected / batch.num_targets, rel=1e-5)
    assert ("boundary" in terms.sums) is (phase != "frozen")
    metrics = SPIDER.metrics(terms.sums)
    assert metrics["loss"] == pytest.approx(terms.total.item(), rel=1e-5)
    assert metrics["lm_loss"] == pytest.approx(nats.item() / batch.num_targets, rel=1e-5)
    weights = {"router_aux": 0.3, "router_z": 0.1, "ponder": 0.2, "boundary": 0.7}
    logged = {name: metrics.get(f"{name}_loss", 0.0) for name in weights}
    added = metrics["lm_loss"] + sum(weights[name] * value for name, value in logged.items())
    assert metrics["loss"] == pytest.approx(added, rel=1e-6)
    assert (logged["boundary"] == 0.0) is (phase == "frozen") and min(logged["ponder"], logged["router_z"]) > 0.0


def test_a_weight_of_zero_takes_a_term_out() -> None:
    names = ("router_z_weight", "act_ponder_weight", "router_aux_weight", "boundary_weight")
    _, _, terms = spider_terms("adaptive", **dict.fromkeys(names, 0.0))
    assert terms.total.item() == pytest.approx(SPIDER.metrics(terms.sums)["lm_loss"], rel=1e-6)


def test_a_frozen_predictor_gets_no_gradient_from_any_term() -> None:
    model, _, terms = spider_terms("frozen", **ALL_TERMS)
    terms.total.backward()
    assert all(parameter.grad is None for parameter in model.boundary_predictor.parameters())
    trained = [p for name, p in model.named_parameters() if not name.startswith("boundary_predictor")]
    assert all(parameter.grad is not None for parameter in trained)


def test_every_parameter_is_trained_in_every_phase() -> None:
    for phase in ("fixed, topk", "fixed, threshold", "adaptive"):
        model, _, terms = spider_terms(phase)
        terms.total.backward()
        assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_reported_statistics_are_counts() -> None:
    model, batch, terms = spider_terms("adaptive")
    out = model(batch.input_ids, max_boundary_rate=0.45)
    metrics = SPIDER.metrics(terms.sums)
    num_bytes = int((batch.input_ids != PAD_ID).sum())
    num_boundaries, num_selected = int(out.boundaries.sum()), int(out.selection.selected.sum())
    assert num_selected > num_boundaries
    assert metrics["boundary_rate"] == pytest.approx(num_boundaries / num_bytes)
    assert metrics["boundary_dropped_share"] == pytest.approx(1 - num_boundaries / num_selected)
    assert metrics["bytes_per_segment"] == pytest.approx(num_bytes / num_boundaries)
    assert metrics["expected_loops"] == pytest.approx(out.ponder[out.filled].mean().item(), rel=1e-5)
    assert terms.sums["expert_load"].sum(-1).tolist() == [[2 * num_boundaries] * 2] * 3
    assert all(not value.requires_grad and value.dtype == torch.float64 for value in terms.sums.values())


def test_after_step_follows_the_quantile_in_fixed_and_the_rate_in_adaptive_phases() -> None:
    model, batch, terms = spider_terms("fixed, topk")
    before = float(model.boundary_predictor.bias)
    context = StepContext(num_targets=batch.num_targets, **CONTEXTS["fixed, topk"])
    SPIDER.after_step(model, terms.sums, context)
    quantile = float(terms.sums["quantile"] / terms.sums["quantile_weight"])
    assert float(model.boundary_predictor.bias) == pytest.approx(0.9 * before - 0.1 * quantile, rel=1e-5)

    model, batch, terms = spider_terms("adaptive")
    SPIDER.after_step(model, terms.sums, StepContext(num_targets=batch.num_targets, **CONTEXTS["adaptive"]))
    rate = float(terms.sums["num_selected"] / terms.sums["num_bytes"])
    real = batch.input_ids != PAD_ID
    logits = model(batch.input_ids).raw_boundary_logits[real]
    spread = float(logits.detach().std(correction=0))
    assert spread > 1.0
    assert float(model.boundary_predictor.bias) == pytest.approx(spread * 0.1 * (RATE - rate), rel=1e-4)


def test_after_step_without_a_usable_row_leaves_the_bias() -> None:
    model = lively_spider()
    model.boundary_predictor.bias.fill_(1.25)
    batch = batch_of(torch.full((1, 64), PAD_ID))
    context = StepContext(num_targets=1, boundary_mode="topk", boundary_phase="fixed")
    SPIDER.after_step(model, SPIDER.loss(model, batch, context).sums, context)
    assert float(model.boundary_predictor.bias) == 1.25


def test_after_step_balances_the_routers_if_told_to() -> None:
    for rate in (0.0, 0.01):
        model, batch, terms = spider_terms("adaptive", router_bias_rate=rate)
        SPIDER.after_step(model, terms.sums, StepContext(num_targets=batch.num_targets))
        for layer, load in zip(model.core.layers, terms.sums["expert_load"].sum(0), strict=True):
            expected = [rate * ((load.mean() > x).int() - (load.mean() < x).int()).item() for x in load]
            assert layer.moe.router.balance_bias.tolist() == pytest.approx(expected)


def test_the_byte_transformers_loss_is_cross_entropy() -> None:
    spec = get_model_spec("byte_transformer")
    model = lively_model(byte_transformer_config())
    batch = batch_of(padded(packed_rows()))
    terms = spec.loss(model, batch, StepContext(num_targets=batch.num_targets))
    logits = model(batch.input_ids).flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, batch.targets.flatten(), ignore_index=PAD_ID)
    torch.testing.assert_close(terms.total, expected)
    metrics = spec.metrics(terms.sums)
    assert metrics["loss"] == metrics["lm_loss"] == pytest.approx(expected.item(), rel=1e-5)
