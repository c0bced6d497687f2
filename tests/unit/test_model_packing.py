"""A document in a packed row is what it is in a row of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spider_titan.vocabulary import EOS_ID, PAD_ID

from .reference.tiny import byte_transformer_config, document, lively_model, lively_spider, row

WHOLE = document(37, 100)
CUT = document(38, 101, ends=False)
TINY = document(0, 102)

BEFORE = {
    "a document": document(11, 1),
    "an empty document": document(0, 2),
    "a long document": document(70, 3),
    "three documents": row(document(2, 4), document(17, 5), document(1, 6)),
    "the end of a document": document(13, 7, begins=False),
    "one byte": document(1, 8, begins=False, ends=False),
    "only an end": [EOS_ID],
    "a document that is cut": document(23, 9, ends=False),
    "bytes of no document": document(64, 10, begins=False, ends=False),
}


def logits_of(model: nn.Module, ids: Sequence[int]) -> Tensor:
    with torch.no_grad():
        out = model(torch.tensor([ids]))
    return (out if isinstance(out, Tensor) else out.logits)[0]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-5)


@pytest.fixture(scope="module")
def spider() -> nn.Module:
    return lively_spider()


@pytest.mark.parametrize("what", BEFORE)
@pytest.mark.parametrize("ids", [WHOLE, CUT, TINY], ids=["whole", "cut", "tiny"])
def test_spider_reads_a_packed_document_as_if_alone(spider: nn.Module, what: str, ids: list[int]) -> None:
    packed = logits_of(spider, row(BEFORE[what], ids))
    assert_close(packed[-len(ids) :], logits_of(spider, ids))


@pytest.mark.parametrize("bias", [-30.0, -4.0, 4.0, 30.0])
def test_packing_at_other_boundary_rates(bias: float) -> None:
    spider = lively_spider()
    spider.boundary_predictor.bias.fill_(bias)
    for before in BEFORE.values():
        assert_close(logits_of(spider, row(before, WHOLE))[-len(WHOLE) :], logits_of(spider, WHOLE))


@pytest.mark.parametrize("what", BEFORE)
def test_the_byte_transformer_reads_a_packed_document_as_if_alone(what: str) -> None:
    model = lively_model(byte_transformer_config())
    packed = logits_of(model, row(BEFORE[what], WHOLE))
    assert_close(packed[-len(WHOLE) :], logits_of(model, WHOLE))


def test_padding_after_a_row_changes_nothing(spider: nn.Module) -> None:
    ids = row(BEFORE["a document"], CUT)
    padded = logits_of(spider, [*ids, *[PAD_ID] * 21])
    assert_close(padded[: len(ids)], logits_of(spider, ids))
    assert torch.isfinite(padded).all()


@pytest.mark.parametrize("changes", [{}, {"boundary_gradient": "cumsum"}, {"attention_window": 3}], ids=str)
def test_rows_packed_in_either_order(changes: dict[str, Any]) -> None:
    spider = lively_spider(seed=2, **changes)
    first, second = document(26, 20), document(31, 21)
    one, other = logits_of(spider, row(first, second)), logits_of(spider, row(second, first))
    assert_close(one, torch.cat((other[len(second) :], other[: len(second)])))


@pytest.mark.parametrize("what", ["a document", "the end of a document", "a long document"])
def test_without_document_masking_the_past_is_seen(what: str) -> None:
    """So the tests above can fail."""
    spider = lively_spider(document_masking=False)
    packed = logits_of(spider, row(BEFORE[what], WHOLE))[-len(WHOLE) :]
    assert (packed - logits_of(spider, WHOLE)).abs().max() > 0.1
