"""Bytes -> segments -> bytes: the layout of a row's segments, pooling into slots and reading back, in O(L * D).

Segment g is the bytes after boundary g - 1 up to and including boundary g, and fills slot g + 1. Slot 0 is the null
slot. Byte l reads slot ``cumsum(boundaries)[l]``, the newest segment that is complete at l; the unfinished tail is
never read by anyone.

Letters: B rows, L bytes, S slots, D hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

NULL_DOCUMENT = -2
UNUSED_DOCUMENT = -3


class Layout(NamedTuple):
    """Integer bookkeeping of a batch's segments.

    Args:
        own_slot: int64 [B, L], slot that byte l is pooled into; S for the tail, PAD and bytes of an earlier document
            that was never closed.
        read_slot: int64 [B, L], slot that byte l reads.
        closing: int64 [B, S], position of the slot's closing byte; 0 where there is none.
        filled: bool [B, S], slots that hold a segment; the null slot does not.
        slot_document: int64 [B, S], document of the slot; numbers of their own for the null slot and unused slots.
    """

    own_slot: Tensor
    read_slot: Tensor
    closing: Tensor
    filled: Tensor
    slot_document: Tensor


def segment_layout(boundaries: Tensor, documents: Tensor, num_slots: int, *, document_masking: bool) -> Layout:
    """Lays out the segments.

    Args:
        boundaries: bool [B, L], at most ``num_slots - 1`` a row.
        documents: int64 [B, L], the document of each byte; -1 at PAD.
        num_slots: S.
        document_masking: Whether a byte reads the null slot until a segment of its own document is complete.
    """
    batch, length = boundaries.shape
    count = boundaries.long().cumsum(-1)
    positions = torch.arange(length, device=boundaries.device).expand(batch, -1)
    closing = torch.zeros(batch, num_slots + 1, dtype=torch.int64, device=boundaries.device)
    closing = closing.scatter(1, count.where(boundaries, num_slots), positions)[:, :num_slots]
    slots = torch.arange(num_slots, device=boundaries.device)
    filled = (slots > 0) & (slots <= count[:, -1:])
    slot_document = documents.gather(1, closing).masked_fill(~filled, UNUSED_DOCUMENT)
    slot_document[:, 0].fill_(NULL_DOCUMENT)

    own_slot = count + (~boundaries).long()
    in_tail = own_slot > count[:, -1:]
    joined = slot_document.gather(1, own_slot.masked_fill(in_tail, 0)) == documents
    own_slot = own_slot.where(joined & (documents >= 0), num_slots)
    read_slot = count
    if document_masking:
        read_slot = count.where(slot_document.gather(1, count) == documents, 0)
    return Layout(own_slot, read_slot, closing, filled, slot_document)


def straight_through_weights(boundaries: Tensor, probs: Tensor) -> Tensor:
    """Pooling weights that are 1 in value and carry FLEXITOKENS' gradient to the probabilities.

    The matrix form weighs byte l in segment g by 1 + c_l - g, with c the exclusive sum of the straight-through
    boundaries (Owodunni et al. 2025, arXiv 2507.12720; after Nawrot et al. 2023, arXiv 2211.09761).

    Args:
        boundaries: bool [B, L].
        probs: fp32 [B, L].

    Returns:
        fp32 [B, L].
    """
    straight_through = boundaries.float() - probs.detach() + probs
    before = straight_through.cumsum(-1) - straight_through
    return 1.0 + (before - before.detach())


def pool(x_BLD: Tensor, layout: Layout, weights_BL: Tensor | None = None) -> Tensor:
    """Mean of each segment plus its closing byte; zero in slots that hold no segment.

    Args:
        x_BLD: [B, L, D].
        layout: From ``segment_layout``.
        weights_BL: fp32 pooling weights; default 1.

    Returns:
        [B, S, D] in x's dtype; sums are taken in fp32.
    """
    batch, _, dim = x_BLD.shape
    num_slots = layout.closing.shape[1]
    rows = torch.arange(batch, device=x_BLD.device)[:, None] * (num_slots + 1)
    index = (rows + layout.own_slot).flatten()
    x = x_BLD.float()
    weights = torch.ones_like(x[..., 0]) if weights_BL is None else weights_BL
    sums = x.new_zeros(batch * (num_slots + 1), dim).index_add(0, index, (x * weights[..., None]).flatten(0, 1))
    total = x.new_zeros(batch * (num_slots + 1)).index_add(0, index, weights.flatten())
    # An empty slot divides by 1; a filled one holds its closing byte, so its weights sum to 1 or more.
    mean = sums / total.where(total > 0, 1.0)[:, None]
    mean = mean.view(batch, num_slots + 1, dim)[:, :num_slots]
    pooled = (mean + gather_rows(x, layout.closing)) * layout.filled[..., None]
    return pooled.to(x_BLD.dtype)


def unpool(r_BSD: Tensor, layout: Layout) -> Tensor:
    """What each byte reads: [B, S, D] -> [B, L, D]."""
    return gather_rows(r_BSD, layout.read_slot)


def gather_rows(x_BND: Tensor, index_BM: Tensor) -> Tensor:
    """``out[b, m] = x[b, index[b, m]]``: [B, N, D], [B, M] -> [B, M, D]."""
    return x_BND.gather(1, index_BM[..., None].expand(-1, -1, x_BND.shape[-1]))


def confidence_scale(boundaries: Tensor, probs: Tensor, free: Tensor) -> Tensor:
    """Factors of what a byte reads: 1 in value, with the gradient of the predictor's confidence in its choice.

    The confidence is p where byte l closes a segment and 1 - p elsewhere (after H-Net, Hwang et al. 2025,
    arXiv 2507.07955, eq. 8); where the choice was not the predictor's, there is no gradient.

    Args:
        boundaries: bool [B, L].
        probs: fp32 [B, L].
        free: bool [B, L].

    Returns:
        fp32 [B, L].
    """
    confidence = probs.where(boundaries, 1.0 - probs) * free
    # The parentheses make the value exactly 1: (1 + c) - c is not.
    return 1.0 + (confidence - confidence.detach())
