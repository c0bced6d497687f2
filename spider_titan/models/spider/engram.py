"""Engram: memory looked up by hashed byte n-grams (after Cheng et al. 2026, "Conditional Memory").

For each segment, the n bytes that end at its closing byte are hashed into tables of vectors. The look-up and the key
and value projections depend on the bytes alone, so they are computed once a forward (``Engram``); the gate and the
convolution depend on the hidden state and are applied in every loop (``EngramGate``).

A hash is the xor of id times multiplier, in int64, modulo a prime. The multipliers depend on (layer, position in the
n-gram) and the primes on (layer, order, head) alone: neither on which other layers have a memory nor on the vocabulary.
They are buffers, saved with the model.

Letters: B rows, L bytes, S slots, D hidden, N longest order, O orders, H heads an order, E dims of a looked-up memory.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider_titan.models.spider.config import SpiderConfig
from spider_titan.vocabulary import PAD_ID

BLANK_ID = PAD_ID
"""Stands for the bytes before a document's start; never an id within a document."""

# ids < 2**9 times multipliers < 2**53 stay below 2**62: no overflow, no negative remainder.
MULTIPLIER_BITS = 53
KERNEL_SIZE = 4
GATE_SMOOTHING = 1e-2

Memory = tuple[Tensor, Tensor]
"""Normed key and value, each [B, S, D]."""


class EngramTable(nn.Module):
    """The n-gram memory of one recurrent layer: hash, tables, projections."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    def __init__(self, config: SpiderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.orders, self.num_heads, self.num_slots = config.engram_orders, config.engram_heads, config.engram_slots
        table_primes = self.table_primes()
        self.embed = nn.Embedding(sum(table_primes), config.engram_head_dim)
        memory_dim = len(table_primes) * config.engram_head_dim
        self.key_proj = nn.Linear(memory_dim, config.hidden_size, bias=False)
        self.key_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.value_proj = nn.Linear(memory_dim, config.hidden_size, bias=False)
        self.register_buffer("multipliers", torch.zeros(max(self.orders), dtype=torch.int64))
        self.register_buffer("primes", torch.zeros(len(self.orders), self.num_heads, dtype=torch.int64))
        self.register_buffer("offsets", torch.zeros(len(self.orders), self.num_heads, dtype=torch.int64))

    def table_primes(self) -> list[int]:
        """Rows of the table of each (order, head), in that order; distinct over all layers too."""
        tables = len(self.orders) * self.num_heads
        return primes_above(self.num_slots, (self.layer + 1) * tables)[-tables:]

    def init_buffers(self) -> None:
        """Sets the hash constants."""
        primes = torch.tensor(self.table_primes())
        self.multipliers.copy_(torch.tensor([multiplier(self.layer, j) for j in range(max(self.orders))]))
        self.primes.copy_(primes.view_as(self.primes))
        self.offsets.copy_((primes.cumsum(0) - primes).view_as(self.offsets))

    def rows(self, ngrams_BSN: Tensor) -> Tensor:
        """Table rows of n-grams given newest byte first: int64 [B, S, N] -> int64 [B, S, O * H]."""
        terms = ngrams_BSN * self.multipliers
        rows = []
        for index, order in enumerate(self.orders):
            mixed = terms[..., 0]
            for position in range(1, order):
                mixed = mixed ^ terms[..., position]
            rows.append(mixed[..., None] % self.primes[index] + self.offsets[index])
        return torch.cat(rows, dim=-1)

    def forward(self, ngrams_BSN: Tensor) -> Memory:
        """int64 [B, S, N] -> normed key and value, each [B, S, D]."""
        memory_BSE = self.embed(self.rows(ngrams_BSN)).flatten(-2)
        return self.key_norm(self.key_proj(memory_BSE)), self.value_proj(memory_BSE)


class Engram(nn.Module):
    """The memories of all recurrent layers that have one, looked up once a forward."""

    def __init__(self, config: SpiderConfig) -> None:
        super().__init__()
        self.longest = max(config.engram_orders)
        self.layers = nn.ModuleDict({str(layer): EngramTable(config, layer) for layer in config.engram_layers})

    def forward(self, ids: Tensor, documents: Tensor, closing: Tensor, filled: Tensor) -> dict[str, Memory]:
        """Looks up the n-grams that end at each slot's closing byte.

        Args:
            ids: int64 [B, L].
            documents: int64 [B, L]; bytes of another document than the closing byte's are blanked.
            closing: int64 [B, S].
            filled: bool [B, S]; the null slot and unused slots have no closing byte and look up a blank n-gram.

        Returns:
            Memory by recurrent layer.
        """
        ngrams = closing_ngrams(ids, documents, closing, filled, self.longest)
        return {name: layer(ngrams) for name, layer in self.layers.items()}


class EngramGate(nn.Module):
    """Adds a layer's memory to its input: ``v + conv(norm(v))`` with ``v = gate * value``.

    The gate is the sigmoid of the signed square root of <key, norm(y)> / sqrt(D). The root is smoothed around 0, where
    its slope would be infinite.
    """

    def __init__(self, config: SpiderConfig) -> None:
        super().__init__()
        dim = config.hidden_size
        self.query_norm = nn.RMSNorm(dim, eps=config.norm_eps)
        self.value_norm = nn.RMSNorm(dim, eps=config.norm_eps)
        self.conv = nn.Conv1d(dim, dim, KERNEL_SIZE, groups=dim, bias=False)

    def forward(self, y_BSD: Tensor, memory: Memory, conv_mask: Tensor) -> Tensor:
        """[B, S, D], memory, bool [B, S, KERNEL_SIZE] (see ``conv_mask``) -> [B, S, D]."""
        key, value = memory
        similarity = (key.float() * self.query_norm(y_BSD).float()).sum(-1, keepdim=True) / math.sqrt(key.shape[-1])
        gated = (signed_sqrt(similarity).sigmoid() * value.float()).to(value.dtype)
        return gated + self.causal_conv(self.value_norm(gated), conv_mask)

    def causal_conv(self, v_BSD: Tensor, conv_mask: Tensor) -> Tensor:
        """Depthwise convolution over the slot and those before it, skipping what ``conv_mask`` hides."""
        num_slots = v_BSD.shape[1]
        padded = F.pad(v_BSD, (0, 0, KERNEL_SIZE - 1, 0))
        taps = (padded[:, j : j + num_slots] * conv_mask[..., j, None] for j in range(KERNEL_SIZE))
        return torch.stack([tap * self.conv.weight[:, 0, j] for j, tap in enumerate(taps)]).sum(0)


def conv_mask(slot_document: Tensor) -> Tensor:
    """Which of the KERNEL_SIZE newest slots belong to the slot's document, oldest first: [B, S] -> bool [B, S, K]."""
    outside = torch.iinfo(slot_document.dtype).min
    return (
        F.pad(slot_document, (KERNEL_SIZE - 1, 0), value=outside).unfold(1, KERNEL_SIZE, 1) == slot_document[..., None]
    )


def closing_ngrams(ids: Tensor, documents: Tensor, closing: Tensor, filled: Tensor, longest: int) -> Tensor:
    """The ``longest`` bytes that end at each closing byte, newest first, blanked before the document's start.

    All blank in slots that hold no segment: the null slot is read from every document and must not know the row.

    Args:
        ids: int64 [B, L].
        documents: int64 [B, L].
        closing: int64 [B, S].
        filled: bool [B, S].
        longest: N.

    Returns:
        int64 [B, S, N].
    """
    batch, num_slots = closing.shape
    positions = closing[..., None] - torch.arange(longest, device=ids.device)
    at = positions.clamp_min(0).flatten(1)
    same_document = documents.gather(1, at).view_as(positions) == documents.gather(1, closing)[..., None]
    inside = filled[..., None] & (positions >= 0) & same_document
    return ids.gather(1, at).view(batch, num_slots, longest).where(inside, BLANK_ID)


def signed_sqrt(x: Tensor) -> Tensor:
    """``sign(x) * sqrt(|x|)``, smooth and of finite slope at 0."""
    return x * (x.square() + GATE_SMOOTHING**2).pow(-0.25)


def multiplier(layer: int, position: int) -> int:
    """An odd number below 2**53 for (layer, position): a splitmix64 step in plain integers."""
    mask = (1 << 64) - 1
    state = ((layer + 1) * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return ((state ^ (state >> 31)) >> (64 - MULTIPLIER_BITS)) | 1


def primes_above(number: int, count: int) -> list[int]:
    """The first ``count`` primes above ``number``."""
    found: list[int] = []
    candidate = number
    while len(found) < count:
        candidate += 1
        if candidate > 1 and all(candidate % divisor for divisor in range(2, math.isqrt(candidate) + 1)):
            found.append(candidate)
    return found
