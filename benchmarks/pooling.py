"""Pooling bytes into segments: index arithmetic in O(L * D) against FLEXITOKENS' matrix in O(L * S * D).

Forward and backward, with the gradient to the boundary probabilities that both have. Each contender starts from the
boundaries, so the layout of the segments and the matrix are part of what is measured.

Letters: B = 1 row, L bytes, S slots, D hidden.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import tyro
from timing import medians, milliseconds, print_table, relative_difference, start
from torch import Tensor

from spider_titan.models.spider.segments import pool, segment_layout, straight_through_weights

RATE, MAX_RATE = 1 / 3.3, 0.34


class Row(NamedTuple):
    """A row in one document: x [1, L, D], probs [1, L], their boundaries, and the gradient of the slots [1, S, D]."""

    x: Tensor
    probs: Tensor
    boundaries: Tensor
    upstream: Tensor

    @property
    def num_slots(self) -> int:
        return self.upstream.shape[1]


def draw_row(length: int, dim: int) -> Row:
    probs = torch.rand(1, length)
    boundaries = torch.zeros(1, length, dtype=torch.bool).scatter(1, probs.topk(int(length * RATE)).indices, True)
    num_slots = 1 + math.ceil(length * MAX_RATE)
    x = torch.randn(1, length, dim)
    return Row(x.requires_grad_(), probs.requires_grad_(), boundaries, torch.randn(1, num_slots, dim))


def by_index(row: Row) -> Tensor:
    """The model's own way."""
    documents = torch.zeros_like(row.boundaries, dtype=torch.int64)
    layout = segment_layout(row.boundaries, documents, row.num_slots, document_masking=True)
    return pool(row.x, layout, straight_through_weights(row.boundaries, row.probs))


def by_matrix(row: Row) -> Tensor:
    """Weights [B, S, L] of every byte in every slot, as one product; then the closing bytes.

    Normalised after the product and not before, which saves passes over [B, S, L] and is the same.
    """
    straight_through = row.boundaries.float() - row.probs.detach() + row.probs
    before = straight_through.cumsum(-1) - straight_through
    segment = row.boundaries.long().cumsum(-1) - row.boundaries.long()
    slots = torch.arange(row.num_slots)[:, None]
    complete = (slots > 0) & (slots <= row.boundaries.sum(-1))
    weights = (1 + before[:, None] - (slots - 1)).masked_fill(segment[:, None] + 1 != slots, 0.0)
    mean = weights @ row.x / (weights.sum(-1, keepdim=True) + ~complete) * complete
    closing = torch.zeros(1, row.num_slots, row.x.shape[-1])
    ends = row.boundaries[0].nonzero()[:, 0]
    return mean + closing.index_add(1, torch.arange(1, len(ends) + 1), row.x[:, ends])


def gradients(row: Row, pooled: Tensor) -> tuple[Tensor, ...]:
    """The pooled slots and the gradients to x and to the probabilities."""
    return (pooled, *torch.autograd.grad(pooled, (row.x, row.probs), row.upstream))


def measure(length: int, dim: int, repetitions: int) -> list[str]:
    """One row of the table."""
    row = draw_row(length, dim)

    def index() -> tuple[Tensor, ...]:
        return gradients(row, by_index(row))

    def matrix() -> tuple[Tensor, ...]:
        return gradients(row, by_matrix(row))

    apart = max(relative_difference(a, b) for a, b in zip(index(), matrix(), strict=True))
    seconds = medians({"index": index, "matrix": matrix}, repetitions=repetitions)
    return [
        f"{length}",
        f"{row.num_slots}",
        milliseconds(seconds["index"]),
        milliseconds(seconds["matrix"]),
        f"{seconds['matrix'] / seconds['index']:.0f}x",
        f"{apart:.0e}",
    ]


def main(
    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192), dim: int = 128, repetitions: int = 9, threads: int = 1
) -> None:
    """Measures both ways of pooling, and how far apart their results are.

    Args:
        lengths: L, bytes a row.
        dim: D, hidden size.
        repetitions: Calls of each way and length.
        threads: CPU threads.
    """
    start(f"pooling forward and backward, B = 1, D = {dim}", threads=threads, repetitions=repetitions)
    torch.manual_seed(0)
    rows = [measure(length, dim, repetitions) for length in lengths]
    print_table(["L", "S", "index ms", "matrix ms", "matrix / index", "relative difference"], rows)


if __name__ == "__main__":
    tyro.cli(main)
