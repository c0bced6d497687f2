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


def visible_documents(documents: Tensor, *, document_masking: bool) -> Tensor:
    """The numbers that decide who sees whom: without masking all documents count as one.

    Args:
        documents: int64, any shape; negative numbers are no documents and stay apart.
        document_masking: Whether positions of different documents are hidden from each other.
    """
    return documents if document_masking else documents.clamp_max(0)


def check_row_length(ids: Tensor, context_length: int) -> None:
    """Raises ValueError if the rows of ``ids`` [B, L] are longer than the model's context."""
    if ids.shape[1] > context_length:
        raise ValueError(f"a row of {ids.shape[1]} bytes is longer than the context of {context_length}")
