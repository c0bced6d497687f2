"""Nothing that comes before a byte depends on it, bit for bit; nor do other rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from spider_titan.models.common.attention import chunk_layout
from spider_titan.models.spider import model as spider_model
from spider_titan.models.spider.segments import Layout, gather_rows
from spider_titan.vocabulary import BOS_ID, EOS_ID, IMAGE_START_ID, PAD_ID

from .reference.tiny import byte_transformer_config, lively_model, lively_spider, packed_rows

IDS = packed_rows()
NUM_ROWS, LENGTH = IDS.shape
REPLACEMENTS = (ord("q"), EOS_ID, 255, BOS_ID, PAD_ID, 0, IMAGE_START_ID)
BIASES = (-30.0, -4.0, 0.0, 4.0, 30.0)

Forward = Callable[[Tensor], Tensor]


class Flip(NamedTuple):
    """Another id at [row, position]."""

    row: int
    position: int
    new_id: int


def flips_of(ids: Tensor, positions: Sequence[int]) -> list[Flip]:
    """Flips at ``positions`` of all rows, and at every fourth special id, to ids that take turns."""
    places = [(row, t) for t in positions for row in range(ids.shape[0])]
    places += (ids > PAD_ID).nonzero().tolist()[::4]
    flips = []
    for index, (row, t) in enumerate(places):
        new_id = REPLACEMENTS[index % len(REPLACEMENTS)]
        flips.append(Flip(row, t, new_id if ids[row, t] != new_id else ord("!")))
    return flips


FLIPS = flips_of(IDS, (0, 1, 2, 10, 11, 31, 32, 33, 47, LENGTH - 2, LENGTH - 1))


def earliest_change(before_LV: Tensor, after_LV: Tensor) -> int:
    """First position whose logits differ in a bit; the length if none does."""
    changed = (before_LV != after_LV).any(-1).nonzero()
    return int(changed[0]) if len(changed) else before_LV.shape[0]


@torch.no_grad()
def leaks(forward: Forward, ids: Tensor, flips: Sequence[Flip]) -> list[str]:
    """Runs a copy of its row for each flip, all copies in one batch beside untouched rows, and says what changed early.

    Every copy is compared with the row in its place of a batch without flips. That a byte's own logits depend on it is
    checked on the way.
    """
    rows = torch.cat((ids[[flip.row for flip in flips]], ids))
    flipped = rows.clone()
    for index, flip in enumerate(flips):
        flipped[index, flip.position] = flip.new_id
    before, after = forward(rows), forward(flipped)
    first = [earliest_change(*pair) for pair in zip(before, after, strict=True)]
    assert all(at <= flip.position for at, flip in zip(first, flips, strict=False))
    found = [f"{flip} changed {at}" for at, flip in zip(first, flips, strict=False) if at < flip.position]
    untouched = enumerate(first[len(flips) :])
    return found + [f"untouched row {row} changed at {at}" for row, at in untouched if at < ids.shape[1]]


def spider_forward(model: nn.Module, mode: str = "threshold", rate: float = 0.45) -> Forward:
    return lambda ids: model(ids, mode, max_boundary_rate=rate).logits


@pytest.fixture(scope="module")
def shared_spider() -> nn.Module:
    return lively_spider()


@pytest.fixture
def spider(shared_spider: nn.Module) -> nn.Module:
    shared_spider.boundary_predictor.bias.zero_()
    return shared_spider


@pytest.mark.parametrize("rate", [0.34, 0.45, 1.0])
@pytest.mark.parametrize("bias", BIASES)
def test_flipping_a_byte_changes_nothing_before_it(spider: nn.Module, bias: float, rate: float) -> None:
    spider.boundary_predictor.bias.fill_(bias)
    assert not leaks(spider_forward(spider, rate=rate), IDS, FLIPS)


def test_the_biases_above_span_all_rates(spider: nn.Module) -> None:
    rates = []
    for bias in BIASES:
        spider.boundary_predictor.bias.fill_(bias)
        out = spider(IDS)
        rates.append(float(out.boundaries[out.selection.free].float().mean()))
    assert rates[0] == 0.0 and rates[-1] == 1.0
    assert 0.05 < rates[1] < rates[2] < rates[3] < 0.95


@pytest.mark.parametrize("bias", BIASES[1:4])
def test_flipping_one_row_of_a_batch(spider: nn.Module, bias: float) -> None:
    spider.boundary_predictor.bias.fill_(bias)
    forward = spider_forward(spider)
    with torch.no_grad():
        before = forward(IDS)
        for row, t, new_id in FLIPS[::3]:
            flipped = IDS.clone()
            flipped[row, t] = new_id
            after = forward(flipped)
            assert torch.equal(before[row, :t], after[row, :t]), (row, t, new_id)
            assert torch.equal(before[torch.arange(NUM_ROWS) != row], after[torch.arange(NUM_ROWS) != row])


@pytest.mark.parametrize("row", range(NUM_ROWS))
def test_flipping_a_byte_of_a_row_alone(spider: nn.Module, row: int) -> None:
    forward = spider_forward(spider)
    with torch.no_grad():
        before = forward(IDS[row : row + 1])
        for t in range(row, LENGTH, 5):
            flipped = IDS[row : row + 1].clone()
            flipped[0, t] = ord("q") if flipped[0, t] == EOS_ID else EOS_ID
            assert earliest_change(before[0], forward(flipped)[0]) == t


def test_a_row_alone_is_the_row_beside_others(spider: nn.Module) -> None:
    with torch.no_grad():
        together = spider(IDS).logits
        for row in range(NUM_ROWS):
            torch.testing.assert_close(spider(IDS[row : row + 1]).logits[0], together[row], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [{"document_masking": False}, {"attention_window": 1}, {"attention_window": 200}, {"boundary_gradient": "cumsum"}],
    ids=str,
)
def test_flipping_a_byte_of_other_models(changes: dict[str, Any]) -> None:
    assert not leaks(spider_forward(lively_spider(seed=1, **changes)), IDS, FLIPS)


@pytest.mark.parametrize("num_loops", [1, 2, 5])
def test_flipping_a_byte_at_another_number_of_loops(spider: nn.Module, num_loops: int) -> None:
    assert not leaks(lambda ids: spider(ids, num_loops=num_loops).logits, IDS, FLIPS)


def test_flipping_a_byte_of_a_long_row(spider: nn.Module) -> None:
    """Several attention chunks over bytes and over slots, of lengths that they do not divide."""
    ids = torch.cat((IDS, IDS.flip(0), IDS, IDS.flip(0), IDS, IDS[:, :13]), dim=1)[:2]
    assert chunk_layout(ids.shape[1], 16)[1] > 1
    assert not leaks(spider_forward(spider, rate=1.0), ids, flips_of(ids, (0, 63, 64, 65, 80, 127, 128, 191, 300, 332)))


def test_flipping_a_byte_in_bfloat16() -> None:
    model = lively_spider().bfloat16()
    model.boundary_predictor.float()
    assert not leaks(spider_forward(model), IDS, FLIPS)


def test_flipping_a_byte_of_the_byte_transformer() -> None:
    assert not leaks(lively_model(byte_transformer_config()), IDS, FLIPS)


def test_topk_looks_ahead(spider: nn.Module) -> None:
    """Documented: which bytes are among a row's largest depends on bytes to come. That mode is for training only."""
    found = leaks(spider_forward(spider, "topk", 0.34), IDS, FLIPS)
    assert found
    assert not [what for what in found if what.startswith("untouched")]


def unpool_own_segment(r_BSD: Tensor, layout: Layout) -> Tensor:
    return gather_rows(r_BSD, layout.own_slot.clamp_max(r_BSD.shape[1] - 1))


def unpool_next_segment(r_BSD: Tensor, layout: Layout) -> Tensor:
    return gather_rows(r_BSD, (layout.read_slot + 1).clamp_max(r_BSD.shape[1] - 1))


def pool_one_ahead(x_BLD: Tensor, layout: Layout, weights_BL: Tensor | None = None) -> Tensor:
    return REAL_POOL(x_BLD.roll(-1, dims=1), layout, weights_BL)


REAL_POOL = spider_model.pool


@pytest.mark.parametrize(
    ("name", "fault"),
    [("unpool", unpool_own_segment), ("unpool", unpool_next_segment), ("pool", pool_one_ahead)],
    ids=["reads its own segment", "reads the next segment", "pools one byte ahead"],
)
def test_a_leak_would_be_found(
    spider: nn.Module, monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Tensor]
) -> None:
    monkeypatch.setattr(spider_model, name, fault)
    assert leaks(spider_forward(spider), IDS, FLIPS)


def test_a_leak_through_the_memory_would_be_found(spider: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = spider.engram.forward

    def one_ahead(ids: Tensor, documents: Tensor, closing: Tensor, filled: Tensor) -> Any:
        return look_up(ids, documents, (closing + 1).clamp_max(LENGTH - 1), filled)

    monkeypatch.setattr(spider.engram, "forward", one_ahead)
    assert leaks(spider_forward(spider), IDS, FLIPS)
