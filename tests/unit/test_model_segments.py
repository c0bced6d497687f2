"""Pooling into segments and reading back, against the matrix form; gradients to the boundary probabilities."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spider_titan.models.common.documents import document_numbers
from spider_titan.models.spider.segments import (
    confidence_scale,
    pool,
    segment_layout,
    straight_through_weights,
    unpool,
)
from spider_titan.vocabulary import BOS_ID, EOS_ID, PAD_ID

from .reference.segments import find_segments, pool_row, slot_read
from .reference.tiny import lively_spider, next_ids, packed_rows

LENGTH, DIM = 33, 5
WRITTEN = {
    # b byte, ( BOS, ) EOS, . PAD; below it 1 where a segment closes
    "random, one document": ("(" + "b" * 32, "010011000100100110001001000100100"),
    "no boundary": ("b" * 33, "0" * 33),
    "a boundary at each byte": ("b" * 33, "1" * 33),
    "only the last byte": ("b" * 33, "0" * 32 + "1"),
    "only the first byte": ("b" * 33, "1" + "0" * 32),
    "PAD tail": ("(bbbbbbbbbbbb)...................", "000010010000010000000000000000000"),
    "nothing but PAD": ("." * 33, "0" * 33),
    "documents": ("bbb)(bbbbbb)(b)()(bbbbbb)(bbbbbbb", "010100100101001010001001100010010"),
    "a document is left open": ("(bbbbbbb(bbbbbbb(bbb)bbb(bbbbbbb)", "000100000001000001001001000000001"),
    "open twice, then PAD": ("(bb(bb(bbb(bbbbbb)...............", "000000000000010001000000000000000"),
}
NUMBERS = {"(": BOS_ID, ")": EOS_ID, ".": PAD_ID, "b": 98}


def read_rows(names: list[str]) -> tuple[Tensor, Tensor]:
    ids = torch.tensor([[NUMBERS[letter] for letter in WRITTEN[name][0]] for name in names])
    return ids, torch.tensor([[mark == "1" for mark in WRITTEN[name][1]] for name in names])


ROWS = list(WRITTEN)


@pytest.mark.parametrize("document_masking", [True, False])
def test_each_byte_reads_the_newest_complete_segment(document_masking: bool) -> None:
    ids, boundaries = read_rows(ROWS)
    documents = document_numbers(ids)
    layout = segment_layout(boundaries, documents, LENGTH + 1, document_masking=document_masking)
    for row, (marks, numbers) in enumerate(zip(boundaries.tolist(), documents.tolist(), strict=True)):
        segments = find_segments(marks, numbers)
        expected = [slot_read(at, segments, numbers, document_masking=document_masking) for at in range(LENGTH)]
        assert layout.read_slot[row].tolist() == expected
        assert layout.filled[row].nonzero().flatten().tolist() == [segment.index + 1 for segment in segments]
        for segment in segments:
            assert layout.closing[row, segment.index + 1] == segment.closing
            assert layout.slot_document[row, segment.index + 1] == numbers[segment.closing]


@pytest.mark.parametrize("num_slots", [LENGTH + 1, 34, 40])
@pytest.mark.parametrize("straight_through", [True, False])
def test_pool_equals_the_matrix_form(num_slots: int, straight_through: bool) -> None:
    ids, boundaries = read_rows(ROWS)
    documents = document_numbers(ids)
    torch.manual_seed(0)
    x = torch.randn(len(ROWS), LENGTH, DIM, requires_grad=True)
    probs = torch.rand(len(ROWS), LENGTH, requires_grad=True)
    output_grad = torch.randn(len(ROWS), num_slots, DIM)

    layout = segment_layout(boundaries, documents, num_slots, document_masking=True)
    weights = straight_through_weights(boundaries, probs) if straight_through else None
    pooled = pool(x, layout, weights)
    (pooled * output_grad).sum().backward()

    x_ref, p_ref = (t.detach().double().requires_grad_() for t in (x, probs))
    hard = boundaries.double()
    ste = hard - p_ref.detach() + p_ref if straight_through else hard + 0 * p_ref
    rows = [
        pool_row(x_ref[row], ste[row], find_segments(boundaries[row].tolist(), documents[row].tolist()), num_slots)
        for row in range(len(ROWS))
    ]
    expected = torch.stack(rows)
    (expected * output_grad).sum().backward()

    torch.testing.assert_close(pooled.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), x_ref.grad, rtol=1e-5, atol=1e-5)
    if straight_through:
        torch.testing.assert_close(probs.grad.double(), p_ref.grad, rtol=1e-5, atol=1e-5)
        assert probs.grad.abs().max() > 0.01
    else:
        assert probs.grad is None


def test_weights_of_one_are_the_mean() -> None:
    ids, boundaries = read_rows(ROWS)
    layout = segment_layout(boundaries, document_numbers(ids), LENGTH + 1, document_masking=True)
    x, probs = torch.randn(len(ROWS), LENGTH, DIM), torch.rand(len(ROWS), LENGTH)
    assert torch.equal(pool(x, layout), pool(x, layout, straight_through_weights(boundaries, probs)))


def test_unpool_reads_the_slots_and_passes_gradients_back() -> None:
    ids, boundaries = read_rows(ROWS)
    layout = segment_layout(boundaries, document_numbers(ids), LENGTH + 1, document_masking=True)
    r = torch.randn(len(ROWS), LENGTH + 1, DIM, requires_grad=True)
    output_grad = torch.randn(len(ROWS), LENGTH, DIM)
    read = unpool(r, layout)
    (read * output_grad).sum().backward()
    expected = torch.zeros_like(r)
    for row in range(len(ROWS)):
        for position in range(LENGTH):
            slot = int(layout.read_slot[row, position])
            assert torch.equal(read[row, position], r[row, slot])
            expected[row, slot] += output_grad[row, position]
    torch.testing.assert_close(r.grad, expected)


@pytest.mark.parametrize("capacity_rate", [0.1, 0.34, 1.0])
def test_overflow_joins_bytes_to_the_tail_and_an_unclosed_document_reads_null(capacity_rate: float) -> None:
    """The whole model's layout under capacity, by the walk along its own boundaries."""
    ids = packed_rows()
    model = lively_spider()
    model.boundary_predictor.bias.fill_(4.0)
    out = model(ids, max_boundary_rate=capacity_rate)
    documents = document_numbers(ids)
    num_slots = out.filled.shape[1]
    layout = segment_layout(out.boundaries, documents, num_slots, document_masking=True)
    if capacity_rate < 1.0:
        assert (out.selection.selected & ~out.boundaries).any()
    null_after_end = 0
    for row, (marks, numbers) in enumerate(zip(out.boundaries.tolist(), documents.tolist(), strict=True)):
        segments = find_segments(marks, numbers)
        assert len(segments) <= num_slots - 1
        expected = [slot_read(at, segments, numbers, document_masking=True) for at in range(ids.shape[1])]
        assert layout.read_slot[row].tolist() == expected
        last = segments[-1].closing
        null_after_end += sum(slot == 0 for slot in expected[last + 1 :])
    assert null_after_end > 0


def test_confidence_is_one_in_value_with_the_gradient_of_the_choice() -> None:
    torch.manual_seed(0)
    boundaries, free = torch.rand(3, 20) > 0.6, torch.rand(3, 20) > 0.2
    probs = torch.rand(3, 20, requires_grad=True)
    u, output_grad = torch.randn(3, 20, DIM), torch.randn(3, 20, DIM)
    scaled = u * confidence_scale(boundaries, probs, free)[..., None]
    assert torch.equal(scaled, u)
    (scaled * output_grad).sum().backward()
    expected = torch.where(boundaries, 1.0, -1.0) * free * (u * output_grad).sum(-1)
    torch.testing.assert_close(probs.grad, expected)


@pytest.mark.parametrize("mode", ["threshold", "topk"])
def test_the_three_gradients_have_the_same_values(mode: str) -> None:
    ids = packed_rows()
    outputs = [lively_spider(boundary_gradient=kind)(ids, mode).logits for kind in ("confidence", "cumsum", "none")]
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def lm_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), next_ids(ids).flatten(), ignore_index=PAD_ID)


@pytest.mark.parametrize(("kind", "reaches"), [("confidence", True), ("cumsum", True), ("none", False)])
def test_how_the_lm_loss_reaches_the_predictor(kind: str, reaches: bool) -> None:
    ids = packed_rows()
    model = lively_spider(boundary_gradient=kind)
    lm_loss(model(ids).logits, ids).backward()
    grads = [parameter.grad for parameter in model.boundary_predictor.parameters()]
    assert all((grad is not None and bool(grad.abs().max() > 0)) is reaches for grad in grads)


def test_confidence_gradient_in_the_whole_model_is_the_closed_form() -> None:
    """dL/dp is <u, dL/du> of what the byte reads, signed by the choice; p's slope is p (1 - p)."""
    ids = packed_rows()
    model = lively_spider(boundary_gradient="confidence")
    seen: dict[str, Tensor] = {}

    def keep(module: torch.nn.Module, inputs: tuple[Tensor]) -> None:
        inputs[0].retain_grad()
        seen["u"] = inputs[0]

    model.out_proj.register_forward_pre_hook(keep)
    out = model(ids)
    lm_loss(out.logits, ids).backward()
    u = seen["u"]
    sign = torch.where(out.boundaries, 1.0, -1.0) * ((ids != PAD_ID) & (ids != EOS_ID))
    p = out.selection.probs.detach()
    expected = (sign * (u * u.grad).sum(-1) * p * (1 - p)).sum()
    torch.testing.assert_close(model.boundary_predictor.output.bias.grad, expected[None], rtol=1e-4, atol=1e-7)


def test_a_frozen_predictor_gets_no_gradient() -> None:
    ids = packed_rows()
    for kind in ("confidence", "cumsum"):
        model = lively_spider(boundary_gradient=kind)
        frozen, trained = model(ids, freeze_boundaries=True), model(ids)
        assert torch.equal(frozen.logits, trained.logits)
        lm_loss(frozen.logits, ids).backward()
        assert all(parameter.grad is None for parameter in model.boundary_predictor.parameters())
