"""Documents back to back -> rows of equal length.

L: positions of a row. A row holds L + 1 ids and shares its last one with the next row, so that inputs ``row[:-1]`` and
targets ``row[1:]`` make every id of the stream, except its very first, a target exactly once.
"""

from __future__ import annotations

import numpy as np

from spider_titan.data.tokenizer import Ids
from spider_titan.vocabulary import PAD_ID


class RowPacker:
    """Packs an endless stream of documents into full rows.

    Ids that are not yet in a row are kept as views of the documents they came in, so a document of any length is
    copied once, row by row.

    Args:
        seq_len: L.
    """

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len
        self._parts: list[Ids] = []
        self._num_ids = 0

    @property
    def num_waiting(self) -> int:
        """Ids that have not been a target yet."""
        return max(0, self._num_ids - 1)

    @property
    def is_ready(self) -> bool:
        """Whether a full row can be taken."""
        return self._num_ids > self.seq_len

    def add(self, ids: Ids) -> None:
        """Appends the ids of a document to the stream."""
        self._parts.append(ids)
        self._num_ids += ids.size

    def take(self) -> Ids:
        """Returns the next row, [L + 1]; its last id stays, as the first of the row after it."""
        assert self.is_ready
        waiting = self._parts[0] if len(self._parts) == 1 else np.concatenate(self._parts)
        self._parts = [waiting[self.seq_len :]]
        self._num_ids -= self.seq_len
        return waiting[: self.seq_len + 1]


def pack_all(ids: Ids, seq_len: int) -> Ids:
    """Packs a finite stream into rows [R, L + 1], the last one filled up with PAD."""
    num_rows = max(0, -(-(ids.size - 1) // seq_len))
    padded = np.full(num_rows * seq_len + 1, PAD_ID, dtype=ids.dtype)
    padded[: ids.size] = ids
    windows = np.lib.stride_tricks.sliding_window_view(padded, min(padded.size, seq_len + 1))
    return windows[::seq_len][:num_rows].copy()
