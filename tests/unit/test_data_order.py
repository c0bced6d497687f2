from collections import Counter

import pytest

from spider_titan.data import order as order_module
from spider_titan.data.order import DocumentOrder, permutation


def read(num_documents: int, positions: range, seed: int = 1) -> list[int]:
    order = DocumentOrder(num_documents, seed=seed, source="english")
    return [order.at(position) for position in positions]


def test_permutation_is_pinned() -> None:
    # A change here changes the data of every run that is resumed.
    assert permutation(10, "1/0/english").tolist() == [7, 2, 8, 6, 1, 9, 4, 3, 5, 0]
    assert read(10, range(10)) == [7, 2, 8, 6, 1, 9, 4, 3, 5, 0]


def test_order_depends_on_seed_epoch_and_source() -> None:
    order = DocumentOrder(50, seed=1, source="a")
    first, second = ([order.at(position) for position in range(start, start + 50)] for start in (0, 50))
    others = [DocumentOrder(50, seed=2, source="a"), DocumentOrder(50, seed=1, source="b")]
    assert first not in [second, *([other.at(position) for position in range(50)] for other in others)]
    assert first == [DocumentOrder(50, seed=1, source="a").at(position) for position in range(50)]


def test_every_document_once_an_epoch_in_a_new_order() -> None:
    documents = read(20, range(60))
    epochs = [documents[start : start + 20] for start in (0, 20, 40)]
    assert all(Counter(epoch) == Counter(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize(("num_documents", "num_shards"), [(7, 1), (7, 2), (12, 4), (3, 5), (1, 3)])
def test_shards_read_every_document_once_an_epoch(num_documents: int, num_shards: int) -> None:
    end = 4 * num_shards * num_documents
    shards = [read(num_documents, range(shard, end, num_shards)) for shard in range(num_shards)]
    assert Counter(number for shard in shards for number in shard) == dict.fromkeys(
        range(num_documents), 4 * num_shards
    )


@pytest.mark.parametrize("kept_numbers", [2**22, 1])
def test_positions_may_be_read_in_any_order(kept_numbers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_module, "KEPT_NUMBERS", kept_numbers)
    expected = read(9, range(108))
    assert read(9, range(107, -1, -1))[::-1] == expected
    order = DocumentOrder(9, seed=1, source="english")
    for position in (0, 70, 0, 40, 100, 70, 10, 0):
        assert order.at(position) == expected[position]
