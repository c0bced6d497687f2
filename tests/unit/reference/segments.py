"""Segments found by walking along the bytes, and pooling as one matrix a row: O(L * S), for tests.

The matrix is FLEXITOKENS': byte l weighs ``1 + c_l - g`` in segment g, with c_l the boundaries before l, if it belongs
to g; columns are normalised. In value that is the mean.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """Positions of a segment's bytes, the last of which closes it, and the number of boundaries before it."""

    members: list[int]
    index: int

    @property
    def closing(self) -> int:
        return self.members[-1]


def find_segments(boundaries: list[bool], documents: list[int]) -> list[Segment]:
    """The complete segments of a row. PAD (document -1) belongs to none, nor does a document that was left open."""
    segments: list[Segment] = []
    running: list[int] = []
    for position, closes in enumerate(boundaries):
        if running and documents[position] != documents[running[-1]]:
            running = []
        if documents[position] >= 0:
            running.append(position)
        if closes:
            segments.append(Segment(running, len(segments)))
            running = []
    return segments


def pool_row(x_LD: Tensor, straight_through_L: Tensor, segments: list[Segment], num_slots: int) -> Tensor:
    """[L, D] -> [S, D]: mean by the matrix form plus the closing byte, at slot index + 1; zero elsewhere."""
    length = x_LD.shape[0]
    before = straight_through_L.cumsum(0) - straight_through_L
    membership = torch.zeros(length, num_slots, dtype=x_LD.dtype)
    index = torch.zeros(length, num_slots, dtype=x_LD.dtype)
    for segment in segments:
        membership[segment.members, segment.index + 1] = 1.0
        index[segment.members, segment.index + 1] = float(segment.index)
    matrix = membership * (1.0 + before[:, None] - index)
    matrix = matrix / (matrix.sum(0) + (membership.sum(0) == 0))
    closing = torch.zeros(num_slots, length, dtype=x_LD.dtype)
    for segment in segments:
        closing[segment.index + 1, segment.closing] = 1.0
    return matrix.T @ x_LD + closing @ x_LD


def slot_read(position: int, segments: list[Segment], documents: list[int], *, document_masking: bool) -> int:
    """The newest segment that is complete at ``position``, or the null slot."""
    complete = [segment for segment in segments if segment.closing <= position]
    if not complete or (document_masking and documents[complete[-1].closing] != documents[position]):
        return 0
    return complete[-1].index + 1
