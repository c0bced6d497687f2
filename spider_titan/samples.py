"""What of a run is better read or looked at than plotted: text cut into its segments, and the load of the experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spider_titan.monitor import relative_load
from spider_titan.vocabulary import BOS_ID, EOS_ID

MAX_BYTES = 1024
LINE_WIDTH = 100
CELL_PIXELS = 16
BORDER = "|"


def segmented_text(ids: Sequence[int], boundaries: Sequence[bool]) -> str:
    """A row as lines of text, with a bar after every byte that closes a segment.

    Args:
        ids: Of the row; its first ``MAX_BYTES`` are shown.
        boundaries: Which of them close a segment.

    Returns:
        Markdown: lines that are indented as code. Bytes that are no UTF-8 within their segment are shown in hex.
    """
    lines: list[str] = []
    line, segment = "", bytearray()
    for id_, closes in zip(ids[:MAX_BYTES], boundaries, strict=False):
        if id_ < 256:
            segment.append(id_)
        elif id_ in (BOS_ID, EOS_ID):
            line, segment = line + _decode(segment) + ("<BOS>" if id_ == BOS_ID else "<EOS>"), bytearray()
        if closes:
            line, segment = line + _decode(segment) + BORDER, bytearray()
        if len(line) >= LINE_WIDTH:
            lines, line = [*lines, line], ""
    return "\n".join(f"    {text}" for text in (*lines, line + _decode(segment)))


def expert_map(load: np.ndarray) -> np.ndarray:
    """A picture of the experts' load over all loops, [loops, layers, E] -> uint8 [height, width].

    A row a layer, a square an expert: black has no load, middle grey an even one, white twice that or more.
    """
    grey = np.clip(np.nan_to_num(relative_load(load.sum(0))) / 2, 0, 1) * 255
    return np.kron(grey.round().astype(np.uint8), np.ones((CELL_PIXELS, CELL_PIXELS), np.uint8))


def _decode(segment: bytearray) -> str:
    return segment.decode("utf-8", errors="backslashreplace").replace("\n", "\\n")
