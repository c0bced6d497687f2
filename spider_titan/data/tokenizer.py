"""Bytes <-> ids. Every byte is its own id; a document is ``BOS bytes EOS``. Nothing is normalised.

Bytes that are no text may stand between markers: ``BOS IMAGE_START bytes IMAGE_END EOS``.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from spider_titan import vocabulary
from spider_titan.vocabulary import BOS_ID, EOS_ID, NUM_BYTES, VOCAB_SIZE

Ids = NDArray[np.int16]

_MAX_CHARACTER_BYTES = 4


Modality = Literal["image", "audio", "video"]

MARKERS: dict[Modality, tuple[int, int]] = {
    "image": (vocabulary.IMAGE_START_ID, vocabulary.IMAGE_END_ID),
    "audio": (vocabulary.AUDIO_START_ID, vocabulary.AUDIO_END_ID),
    "video": (vocabulary.VIDEO_START_ID, vocabulary.VIDEO_END_ID),
}
"""The ids before and after the bytes of a modality."""

_SIGNATURES: tuple[tuple[int, bytes, Modality], ...] = (
    (0, b"\x89PNG\r\n\x1a\n", "image"),
    (0, b"\xff\xd8\xff", "image"),
    (0, b"GIF8", "image"),
    (0, b"BM", "image"),
    (0, b"II*\0", "image"),
    (0, b"MM\0*", "image"),
    (8, b"WEBP", "image"),
    (8, b"WAVE", "audio"),
    (0, b"fLaC", "audio"),
    (0, b"OggS", "audio"),
    (0, b"ID3", "audio"),
    (0, b"\xff\xfb", "audio"),
    (0, b"\x1aE\xdf\xa3", "video"),
    (4, b"ftyp", "video"),
    (8, b"AVI ", "video"),
)
"""Offset, bytes there, and what a file that has them is."""


def modality_of(document: bytes) -> Modality | None:
    """What a document is by the signature it begins with; None if it has none of those known."""
    for offset, signature, modality in _SIGNATURES:
        if document.startswith(signature, offset):
            return modality
    return None


def encode(document: bytes, markers: Modality | Literal["auto"] | None = None) -> Ids:
    """Returns the ids of ``BOS document EOS``, int16 [len(document) + 2], or with markers [len(document) + 4].

    Args:
        document: Its bytes.
        markers: Which ones stand around them; auto: those of ``modality_of(document)``; None: none.
    """
    modality = modality_of(document) if markers == "auto" else markers
    lead = 1 if modality is None else 2
    ids = np.empty(len(document) + 2 * lead, dtype=np.int16)
    ids[0], ids[-1] = BOS_ID, EOS_ID
    if modality is not None:
        ids[1], ids[-2] = MARKERS[modality]
    ids[lead:-lead] = np.frombuffer(document, dtype=np.uint8)
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
