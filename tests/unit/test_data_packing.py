import random

import numpy as np
import pytest

from spider_titan.data.packing import RowPacker, pack_all
from spider_titan.data.tokenizer import encode
from spider_titan.vocabulary import PAD_ID

SEQ_LEN = 8
EDGES = [0, 1, SEQ_LEN - 1, SEQ_LEN, SEQ_LEN + 1, 3 * SEQ_LEN]


def random_documents(seed: int, lengths: list[int]) -> list[bytes]:
    rng = random.Random(seed)
    return [bytes(rng.randrange(256) for _ in range(length)) for length in lengths]


def reference_stream(documents: list[bytes]) -> list[int]:
    return [number for document in documents for number in [257, *document, 258]]


def reference_rows(stream: list[int], seq_len: int) -> list[list[int]]:
    """All full rows, written with plain lists."""
    rows, start = [], 0
    while start + seq_len + 1 <= len(stream):
        rows.append(stream[start : start + seq_len + 1])
        start += seq_len
    return rows


def pack(documents: list[bytes], seq_len: int) -> list[list[int]]:
    packer, rows = RowPacker(seq_len), []
    for document in documents:
        packer.add(encode(document))
        while packer.is_ready:
            rows.append(packer.take().tolist())
    return rows


LENGTHS = (
    [[edge] * 7 for edge in EDGES] + [EDGES, EDGES[::-1]] + [random.Random(s).choices(range(40), k=30) for s in (1, 2)]
)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("seq_len", [1, 2, SEQ_LEN, 33])
def test_rows_equal_the_reference_and_every_id_is_a_target_once(lengths: list[int], seq_len: int) -> None:
    documents = random_documents(len(lengths), lengths)
    stream = reference_stream(documents)
    rows = pack(documents, seq_len)
    assert rows == reference_rows(stream, seq_len)
    targets = [number for row in rows for number in row[1:]]
    assert targets == stream[1 : 1 + len(targets)]
    assert len(stream) - 1 - len(targets) < seq_len


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("seq_len", [1, 2, SEQ_LEN, 33])
def test_a_finite_stream_is_packed_to_its_end(lengths: list[int], seq_len: int) -> None:
    stream = reference_stream(random_documents(len(lengths), lengths))
    rows = pack_all(np.array(stream, dtype=np.int16), seq_len)
    assert rows[:, 1:][rows[:, 1:] != PAD_ID].tolist() == stream[1:]
    full = reference_rows(stream, seq_len)
    assert rows[: len(full)].tolist() == full
    assert len(rows) - len(full) <= 1
    assert (rows[1:, 0] == rows[:-1, -1]).all()


def test_rows_may_be_taken_late() -> None:
    documents = random_documents(9, [5, 0, 100, 1, 31])
    packer = RowPacker(SEQ_LEN)
    for document in documents:
        packer.add(encode(document))
    rows = []
    while packer.is_ready:
        rows.append(packer.take().tolist())
    assert rows == reference_rows(reference_stream(documents), SEQ_LEN)
    assert packer.num_waiting == len(reference_stream(documents)) - 1 - len(rows) * SEQ_LEN
