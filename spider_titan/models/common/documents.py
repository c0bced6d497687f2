"""Which document each id of a packed row belongs to."""

from __future__ import annotations

from torch import Tensor

from spider_titan.vocabulary import BOS_ID, PAD_ID


def document_numbers(ids: Tensor) -> Tensor:
    """Numbers documents from each row's start; a row may begin within one.

    Args:
        ids: int64 [B, L].

    Returns:
        int64 [B, L]: the number of BOS ids up to and including the position; -1 at PAD.
    """
    return (ids == BOS_ID).long().cumsum(-1).masked_fill(ids == PAD_ID, -1)
