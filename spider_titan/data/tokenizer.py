"""Bytes <-> ids. Every byte is its own id; a document is ``BOS bytes EOS``. Nothing is normalised."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spider_titan.vocabulary import BOS_ID, EOS_ID, NUM_BYTES, VOCAB_SIZE

Ids = NDArray[np.int16]

_MAX_CHARACTER_BYTES = 4


def encode(document: bytes) -> Ids:
    """Returns the ids of ``BOS document EOS``, int16 [len(document) + 2]."""
    ids = np.empty(len(document) + 2, dtype=np.int16)
    ids[0] = BOS_ID
    ids[1:-1] = np.frombuffer(document, dtype=np.uint8)
    ids[-1] = EOS_ID
    return ids


def decode(ids: ArrayLike) -> bytes:
    """Returns the bytes among ``ids`` in order; specials are dropped.

    Args:
        ids: Integers of any shape that numpy can read (a list, an array, a CPU tensor).

    Raises:
        ValueError: If an id is not in the vocabulary.
    """
    array = np.asarray(ids)
    if array.size and (array.min() < 0 or array.max() >= VOCAB_SIZE):
        raise ValueError(f"ids range from {array.min()} to {array.max()}; the vocabulary has 0..{VOCAB_SIZE - 1}")
    return array[array < NUM_BYTES].astype(np.uint8).tobytes()


def cut_at_character_boundary(data: bytes, limit: int) -> bytes:
    """Returns the longest beginning of ``data`` within ``limit`` bytes that does not split a UTF-8 character.

    Bytes that are part of no valid character may be cut anywhere, so at most three bytes less than ``limit`` are kept.
    """
    if len(data) <= limit:
        return data
    for start in range(max(0, limit - _MAX_CHARACTER_BYTES + 1), limit):
        length = _character_length(data[start])
        if start + length > limit and _is_character(data[start : start + length]):
            return data[:start]
    return data[:limit]


def _character_length(lead: int) -> int:
    """Bytes of the character that the byte ``lead`` would begin."""
    if lead >= 0xF0:
        return 4
    if lead >= 0xE0:
        return 3
    return 2 if lead >= 0xC0 else 1


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode("utf-8")) == 1
    except UnicodeDecodeError:
        return False
