from collections import Counter

import pytest

from spider_titan.data.order import DocumentOrder, permutation


def read(num_documents: int, count: int, *, rank: int = 0, world_size: int = 1, seed: int = 1) -> list[int]:
    order = DocumentOrder(num_documents, seed=seed, source="english", rank=rank, world_size=world_size)
    return [order.next() for _ in range(count)]


def test_permutation_is_pinned() -> None:
    # A change here changes the data of every run that is resumed.
    assert permutation(10, seed=1, epoch=0, source="english").tolist() == [7, 2, 8, 6, 1, 9, 4, 3, 5, 0]


def test_permutation_depends_on_seed_epoch_and_source() -> None:
    base = permutation(50, seed=1, epoch=0, source="a").tolist()
    assert sorted(base) == list(range(50))
    assert base == permutation(50, seed=1, epoch=0, source="a").tolist()
    others = [dict(seed=2, epoch=0, source="a"), dict(seed=1, epoch=1, source="a"), dict(seed=1, epoch=0, source="b")]
    assert all(base != permutation(50, **other).tolist() for other in others)


@pytest.mark.parametrize(("num_documents", "world_size"), [(7, 1), (7, 2), (12, 4), (3, 5), (1, 3)])
def test_ranks_share_one_sequence(num_documents: int, world_size: int) -> None:
    epochs = 4 * world_size
    alone = read(num_documents, epochs * num_documents)
    ranks = [
        read(num_documents, epochs * num_documents // world_size, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    assert [ranks[g % world_size][g // world_size] for g in range(len(alone))] == alone


def test_every_document_once_an_epoch_in_a_new_order() -> None:
    documents = read(20, 60)
    epochs = [documents[start : start + 20] for start in (0, 20, 40)]
    assert all(Counter(epoch) == Counter(range(20)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_position_is_the_whole_state() -> None:
    order = DocumentOrder(9, seed=3, source="x", rank=1, world_size=2)
    for _ in range(13):
        order.next()
    other = DocumentOrder(9, seed=3, source="x", rank=1, world_size=2)
    other.position = order.position
    assert (other.epoch, [other.next() for _ in range(30)]) == (order.epoch, [order.next() for _ in range(30)])
