import random
from collections.abc import Callable

import numpy as np
import pytest

from spider_titan import vocabulary
from spider_titan.data.tokenizer import cut_at_character_boundary, decode, encode


def random_bytes(rng: random.Random, length: int) -> bytes:
    return bytes(rng.randrange(256) for _ in range(length))


def random_text(rng: random.Random, length: int) -> bytes:
    """Characters of one to four bytes, with surrogates left out."""
    ranges = [(0, 0x7F), (0x80, 0x7FF), (0x800, 0xD7FF), (0xE000, 0xFFFF), (0x10000, 0x10FFFF)]
    return "".join(chr(rng.randint(*rng.choice(ranges))) for _ in range(length)).encode()


def test_specials_fill_the_vocabulary_after_the_bytes() -> None:
    ids = [value for name, value in vars(vocabulary).items() if name.endswith("_ID")] + list(vocabulary.RESERVED_IDS)
    assert sorted(ids) == list(range(256, 272))


@pytest.mark.parametrize("length", [0, 1, 2, 255, 1000])
def test_encode_equals_a_list_of_bytes_between_bos_and_eos(length: int) -> None:
    document = random_bytes(random.Random(length), length)
    assert encode(document).tolist() == [257, *document, 258]
    assert decode(encode(document)) == document


def test_every_byte_survives() -> None:
    document = bytes(range(256)) + b"\r\n\xef\xbb\xbf\x00"
    assert decode(encode(document).tolist()) == document


def test_decode_drops_all_specials_and_refuses_what_is_no_id() -> None:
    assert decode(np.array([[257, 65], [271, 256]])) == b"A"
    assert decode([]) == b""
    for wrong in (-1, 272):
        with pytest.raises(ValueError, match=r"0\.\.271"):
            decode([65, wrong])


def splits_a_character(data: bytes, cut: int) -> bool:
    """Whether some valid character lies on both sides of ``cut``, by trying every span."""
    for start in range(max(0, cut - 3), cut):
        for end in range(cut + 1, min(len(data), start + 4) + 1):
            try:
                if len(data[start:end].decode("utf-8")) == 1:
                    return True
            except UnicodeDecodeError:
                continue
    return False


def longest_cut(data: bytes, limit: int) -> bytes:
    cut = min(limit, len(data))
    while splits_a_character(data, cut):
        cut -= 1
    return data[:cut]


@pytest.mark.parametrize("kind", [random_text, random_bytes])
def test_cut_equals_brute_force(kind: Callable[[random.Random, int], bytes]) -> None:
    rng = random.Random(3)
    for _ in range(150):
        data = kind(rng, rng.randint(0, 12))
        if rng.random() < 0.5:  # truncated, or with a stray byte, in front of or behind whole characters
            data = random_bytes(rng, 1) + data[: rng.randint(0, len(data))]
        for limit in range(1, len(data) + 2):
            assert cut_at_character_boundary(data, limit) == longest_cut(data, limit), (data, limit)


def test_cut_text_is_still_valid_and_loses_at_most_three_bytes() -> None:
    data = random_text(random.Random(5), 200)
    for limit in range(1, len(data)):
        cut = cut_at_character_boundary(data, limit)
        cut.decode("utf-8")
        assert limit - 3 <= len(cut) <= limit
