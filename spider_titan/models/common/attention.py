"""Causal attention in a sliding window that never crosses documents, at a cost linear in the length.

On CUDA flex_attention skips the blocks that the mask empties. It has no backward on the CPU: there queries are cut
into chunks, and each chunk attends to the few chunks of keys its window reaches, by scaled_dot_product_attention.

Letters: B rows, L positions, H heads, K query/key dims, V value dims, C chunk, N chunks a row, P chunks looked back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

MIN_CHUNK = 64
SHORT_ROW = 256
"""Rows up to this length are one chunk: cutting them costs more than the masked work it saves."""


FLEX_BLOCK = 128
"""flex_attention's own block size: it skips blocks that no query of a block sees."""


class ChunkMask(NamedTuple):
    """Which keys each chunk of queries sees: bool [B * N, 1, C, (P + 1) * C]."""

    visible: Tensor


class ShapeMask(NamedTuple):
    """Stands for a mask on the meta device, where nothing is computed."""


AttentionMask = ChunkMask | BlockMask | ShapeMask


def attention_mask(documents: Tensor, window: int) -> AttentionMask:
    """Builds the mask once for all layers of a stack.

    Args:
        documents: int64 [B, L]; positions with different numbers do not see each other.
        window: A query sees itself and the ``window - 1`` positions before it.
    """
    if documents.device.type == "cuda":
        return _flex_mask(documents, window)
    if documents.device.type == "meta":
        return ShapeMask()
    return _chunk_mask(documents, window)


def windowed_attention(q_BLHK: Tensor, k_BLHK: Tensor, v_BLHV: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    """Softmax attention under ``mask``.

    Args:
        q_BLHK: Queries.
        k_BLHK: Keys.
        v_BLHV: Values.
        mask: From ``attention_mask`` over the same B and L.
        scale: Multiplies the logits.

    Returns:
        [B, L, H, V].
    """
    if isinstance(mask, BlockMask):
        q, k, v = (x.transpose(1, 2) for x in (q_BLHK, k_BLHK, v_BLHV))
        return _flex()(q, k, v, block_mask=mask, scale=scale).transpose(1, 2)
    if isinstance(mask, ShapeMask):
        return _ShapeOfAttention.apply(q_BLHK, k_BLHK, v_BLHV)
    return _chunked_attention(q_BLHK, k_BLHK, v_BLHV, mask, scale)


def chunk_layout(length: int, window: int) -> tuple[int, int, int]:
    """(C, N, P): chunk size, chunks a row, chunks looked back; (P + 1) * C is a small multiple of the window."""
    reach = min(window, length)
    chunk = length if length <= SHORT_ROW else max(MIN_CHUNK, reach // 4)
    num_chunks = -(-length // chunk)
    lookback = min(-(-(reach - 1) // chunk), num_chunks - 1)
    return chunk, num_chunks, lookback


def _chunk_mask(documents: Tensor, window: int) -> ChunkMask:
    batch, length = documents.shape
    chunk, num_chunks, lookback = chunk_layout(length, window)
    positions = torch.arange(length, device=documents.device).expand(batch, -1)
    query = positions[0, :chunk, None]
    key = torch.arange(-lookback * chunk, chunk, device=documents.device)
    distance = query - key
    in_window = (distance >= 0) & (distance < window)
    # Positions that pad the row's ends see each other only, so that no softmax is over nothing.
    outside = torch.iinfo(documents.dtype).min
    padded = F.pad(documents, (lookback * chunk, num_chunks * chunk - length), value=outside)
    key_documents = padded.unfold(1, (lookback + 1) * chunk, chunk)
    query_documents = padded[:, lookback * chunk :].unflatten(1, (num_chunks, chunk))
    visible = in_window & (query_documents[..., :, None] == key_documents[..., None, :])
    return ChunkMask(visible.flatten(0, 1)[:, None])


def _chunked_attention(q: Tensor, k: Tensor, v: Tensor, mask: ChunkMask, scale: float) -> Tensor:
    batch, length = q.shape[:2]
    chunk, span = mask.visible.shape[-2:]
    num_chunks = mask.visible.shape[0] // batch
    if num_chunks == 1:
        return _attend(q, k, v, mask.visible, scale)
    lookback, tail = span // chunk - 1, num_chunks * chunk - length

    def in_chunks(x: Tensor, before: int) -> Tensor:  # [B, L, H, K] -> [B, before + N, C, H, K]
        return F.pad(x, (0, 0, 0, 0, before * chunk, tail)).unflatten(1, (before + num_chunks, chunk))

    def as_keys(x: Tensor) -> Tensor:  # [B, L, H, K] -> [B * N, (P + 1) * C, H, K]
        return _Overlapping.apply(in_chunks(x, lookback), lookback).flatten(0, 1)

    out = _attend(in_chunks(q, 0).flatten(0, 1), as_keys(k), as_keys(v), mask.visible, scale)
    return out.unflatten(0, (batch, num_chunks)).flatten(1, 2)[:, :length]


def _attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention of [B, L, H, K] queries over other lengths of keys and values."""
    value_dim = v.shape[-1]
    # The CPU's flash kernel wants one head size; zeros in the value's last dims cost less than the unfused path.
    v = F.pad(v, (0, q.shape[-1] - value_dim)) if value_dim < q.shape[-1] else v
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    return out.transpose(1, 2)[..., :value_dim]


class _Overlapping(torch.autograd.Function):
    """Each chunk joined to the P before it: [B, P + N, C, H, K] -> [B, N, (P + 1) * C, H, K].

    The gradient is added up in one buffer; the library's slices would fill one with zeros for each of the P + 1.
    """

    @staticmethod
    def forward(ctx: Any, chunks: Tensor, lookback: int) -> Tensor:
        ctx.lookback = lookback
        num_chunks = chunks.shape[1] - lookback
        return torch.cat([chunks[:, start : start + num_chunks] for start in range(lookback + 1)], dim=2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = grad.chunk(ctx.lookback + 1, dim=2)
        batch, num_chunks, chunk = parts[0].shape[:3]
        total = grad.new_zeros(batch, ctx.lookback + num_chunks, chunk, *grad.shape[3:])
        for start, part in enumerate(parts):
            total[:, start : start + num_chunks] += part
        return total, None


class _ShapeOfAttention(torch.autograd.Function):
    """What an attention kernel keeps and gives on the meta device: its inputs, its result and a number a query."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(v.shape)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _flex_mask(documents: Tensor, window: int) -> BlockMask:
    """The same mask for flex_attention; work and memory are those of the L / 128 squared blocks, not of L squared."""
    length = documents.shape[1]
    num_blocks = -(-length // FLEX_BLOCK)
    tail = num_blocks * FLEX_BLOCK - length
    # Replicating by F.pad would need a floating dtype on CUDA.
    padded = torch.cat((documents, documents[:, -1:].expand(-1, tail)), dim=1)
    blocks = padded.unflatten(1, (num_blocks, FLEX_BLOCK))
    lowest, highest = blocks.amin(-1), blocks.amax(-1)
    index = torch.arange(num_blocks, device=documents.device)
    query, key = index[:, None], index
    in_window = (query >= key) & ((query - key - 1) * FLEX_BLOCK + 1 < window)
    shares_document = (highest[:, None, :] >= lowest[:, :, None]) & (lowest[:, None, :] <= highest[:, :, None])
    needed = (in_window & shares_document)[:, None]

    def visible(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same_document = documents[b, query] == documents[b, key]
        return (query >= key) & (query - key < window) & same_document

    return BlockMask.from_kv_blocks(
        needed.sum(-1, dtype=torch.int32),
        needed.int().argsort(dim=-1, descending=True, stable=True).int(),
        BLOCK_SIZE=FLEX_BLOCK,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


def _flex() -> Callable[..., Any]:
    if torch.compiler.is_compiling():
        # It becomes a part of the graph of the block that is being compiled.
        return flex_attention
    return _compiled_flex()


@cache
def _compiled_flex() -> Callable[..., Any]:
    # Uncompiled, flex_attention materialises the full score matrix.
    compiled: Callable[..., Tensor] = torch.compile(flex_attention)
    return compiled
