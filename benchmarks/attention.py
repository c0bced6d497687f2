"""Attention in a fixed window: what a layer costs when the row gets twice as long.

The model's windowed attention should take twice as long; scaled_dot_product_attention with the same window as a mask
over the whole row should take four times as long. The masks are built beforehand, as the model builds one for all
layers. Forward and backward.

Letters: B = 1 row, L positions, H heads, K query/key dims.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import tyro
from timing import medians, milliseconds, print_table, relative_difference, start
from torch import Tensor

from spider_titan.models.common.attention import attention_mask, windowed_attention


def contenders(length: int, window: int, heads: int, dim: int) -> dict[str, Callable[[], list[Tensor]]]:
    """Both ways over the same row: functions that return the output and the gradients of q, k and v."""
    q, k, v = (torch.randn(1, length, heads, dim, requires_grad=True) for _ in range(3))
    upstream = torch.randn_like(q)
    mask = attention_mask(torch.zeros(1, length, dtype=torch.int64), window)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    full_mask = (distance >= 0) & (distance < window)

    def with_gradients(out: Tensor) -> list[Tensor]:
        return [out, *torch.autograd.grad(out, (q, k, v), upstream)]

    def windowed() -> list[Tensor]:
        return with_gradients(windowed_attention(q, k, v, mask, dim**-0.5))

    def full() -> list[Tensor]:
        queries, keys, values = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=full_mask)
        return with_gradients(out.transpose(1, 2))

    return {"windowed": windowed, "full": full}


def main(
    lengths: tuple[int, ...] = (2048, 4096, 8192),
    window: int = 256,
    heads: int = 4,
    dim: int = 48,
    repetitions: int = 7,
    threads: int = 1,
) -> None:
    """Measures both ways at every length, and how far apart outputs and gradients are.

    Args:
        lengths: L, positions a row.
        window: Positions a query sees, itself included.
        heads: H.
        dim: K, also the dims of a value.
        repetitions: Calls of each way and length.
        threads: CPU threads.
    """
    start(
        f"attention in a window of {window}, B = 1, H = {heads}, K = {dim}, forward and backward",
        threads=threads,
        repetitions=repetitions,
    )
    torch.manual_seed(0)
    ways = {length: contenders(length, window, heads, dim) for length in lengths}
    # All lengths take turns too: it is their ratios that count.
    seconds = medians(
        {f"{name} {length}": run for length, pair in ways.items() for name, run in pair.items()},
        repetitions=repetitions,
    )
    rows = []
    before: int | None = None
    for length, pair in ways.items():
        windowed, full = seconds[f"windowed {length}"], seconds[f"full {length}"]
        growth = [seconds[f"{name} {length}"] / seconds[f"{name} {before}"] if before else None for name in pair]
        apart = [relative_difference(a, b) for a, b in zip(pair["windowed"](), pair["full"](), strict=True)]
        rows.append(
            [
                f"{length}",
                milliseconds(windowed),
                milliseconds(full),
                *(f"{ratio:.2f}x" if ratio else "" for ratio in growth),
                f"{full / windowed:.1f}x",
                f"{max(apart):.0e}",
            ]
        )
        before = length
    print_table(
        ["L", "windowed ms", "full ms", "windowed growth", "full growth", "full / windowed", "relative difference"],
        rows,
    )


if __name__ == "__main__":
    tyro.cli(main)
