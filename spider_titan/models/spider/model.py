"""Spider: bytes -> prelude -> boundaries -> segments -> recurrent core -> bytes -> coda -> logits.

Letters: B rows, L bytes, S slots, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from spider_titan.models.common.attention import attention_mask
from spider_titan.models.common.blocks import DenseBlock
from spider_titan.models.common.documents import check_row_length, document_numbers, visible_documents
from spider_titan.models.common.rotary import rotary_table, yarn_frequencies
from spider_titan.models.spider.boundary import BoundaryPredictor, Selection, select_boundaries
from spider_titan.models.spider.config import SpiderConfig
from spider_titan.models.spider.engram import Engram, conv_mask
from spider_titan.models.spider.moe import RouterStats
from spider_titan.models.spider.recurrence import CoreOutput, LoopSums, RecurrentCore
from spider_titan.models.spider.segments import (
    Layout,
    confidence_scale,
    pool,
    segment_layout,
    straight_through_weights,
    unpool,
)
from spider_titan.vocabulary import VOCAB_SIZE


class SpiderOutput(NamedTuple):
    """Result of a forward.

    Args:
        logits: [B, L, V] in the compute dtype.
        boundaries: bool [B, L], bytes that close a segment.
        selection: Boundary logits, probabilities and masks.
        raw_boundary_logits: fp32 [B, L], the predictor's output without its bias.
        filled: bool [B, S], slots that hold a segment.
        ponder: fp32 [B, S], expected number of loops.
        router: Router statistics, leading dim loops * layers.
        loops: Statistics of the loops.
    """

    logits: Tensor
    boundaries: Tensor
    selection: Selection
    raw_boundary_logits: Tensor
    filled: Tensor
    ponder: Tensor
    router: RouterStats
    loops: LoopSums


class Spider(nn.Module):
    """The model. ``model(ids, boundary_mode="threshold")`` is strictly causal; ``topk`` is for training only."""

    def __init__(self, config: SpiderConfig) -> None:
        super().__init__()
        self.config = config
        dim, inner, eps = config.hidden_size, config.intermediate_size, config.norm_eps
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, dim)
        self.prelude = nn.ModuleList(DenseBlock(config.attention, inner) for _ in range(config.num_prelude_layers))
        self.boundary_predictor = BoundaryPredictor(config)
        self.null_slot = nn.Parameter(torch.empty(dim))
        self.pool_norm = nn.RMSNorm(dim, eps=eps)
        self.engram = Engram(config)
        self.core = RecurrentCore(config)
        self.unpool_norm = nn.RMSNorm(dim, eps=eps)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.coda = nn.ModuleList(DenseBlock(config.attention, inner) for _ in range(config.num_coda_layers))
        self.norm = nn.RMSNorm(dim, eps=eps)
        self.lm_head = nn.Linear(dim, VOCAB_SIZE, bias=False)
        self.frequencies = yarn_frequencies(
            config.qk_rope_head_dim,
            theta=config.rope_theta,
            factor=config.rope_factor,
            original_length=config.rope_original_length,
        )

    def forward(
        self,
        ids: Tensor,
        boundary_mode: str = "threshold",
        *,
        max_boundary_rate: float = 1.0,
        num_loops: int | None = None,
        freeze_boundaries: bool = False,
    ) -> SpiderOutput:
        """Computes next-id logits.

        Args:
            ids: int64 [B, L].
            boundary_mode: ``threshold`` or ``topk``.
            max_boundary_rate: Fixes the number of slots, 1 + ceil(L * rate); boundaries beyond are dropped.
            num_loops: Default: the trained number.
            freeze_boundaries: No gradient reaches the boundary predictor.

        Raises:
            ValueError: If the row is longer than the model's context, or ``boundary_mode`` is unknown.
        """
        length = ids.shape[1]
        check_row_length(ids, self.config.context_length)
        documents = document_numbers(ids)
        visible = visible_documents(documents, document_masking=self.config.document_masking)
        rotary = rotary_table(length, self.frequencies, ids.device)
        mask = attention_mask(visible, self.config.attention_window)

        x_BLD = self.embed_tokens(ids)
        for block in self.prelude:
            x_BLD = block(x_BLD, rotary, mask)

        num_slots = 1 + math.ceil(round(length * max_boundary_rate, 6))
        # An alias of its own makes the predictor's gradients add up before they join x's others, as they do when the
        # predictor is a sharded unit: so both give the same bits.
        raw_logits = self.boundary_predictor(x_BLD.view_as(x_BLD))
        if freeze_boundaries:
            raw_logits = raw_logits.detach()
        selection = select_boundaries(
            raw_logits,
            self.boundary_predictor.bias,
            ids,
            mode=boundary_mode,
            rate=self.config.boundary_rate,
            capacity=num_slots - 1,
        )
        layout = segment_layout(
            selection.boundaries, documents, num_slots, document_masking=self.config.document_masking
        )
        core = self.think(x_BLD, ids, documents, selection, layout, num_loops or self.config.num_loops)
        x_BLD = x_BLD + self.read(core.r, selection, layout)

        for block in self.coda:
            x_BLD = block(x_BLD, rotary, mask)
        logits = self.lm_head(self.norm(x_BLD))
        return SpiderOutput(
            logits, selection.boundaries, selection, raw_logits, layout.filled, core.ponder, core.router, core.loops
        )

    def think(
        self, x_BLD: Tensor, ids: Tensor, documents: Tensor, selection: Selection, layout: Layout, num_loops: int
    ) -> CoreOutput:
        """Pools bytes into segments and runs the recurrent core over them."""
        weights = None
        if self.config.boundary_gradient == "cumsum":
            weights = straight_through_weights(selection.boundaries, selection.probs)
        segments = self.pool_norm(pool(x_BLD, layout, weights))
        null = self.null_slot.to(segments.dtype).expand(segments.shape[0], 1, -1)
        z_BSD = torch.cat((null, segments[:, 1:]), dim=1)

        slot_document = visible_documents(layout.slot_document, document_masking=self.config.document_masking)
        return self.core(
            z_BSD,
            rotary_table(z_BSD.shape[1], self.frequencies, ids.device),
            attention_mask(slot_document, self.config.attention_window),
            layout.filled,
            self.engram(ids, documents, layout.closing, layout.filled),
            conv_mask(slot_document),
            num_loops,
        )

    def read(self, r_BSD: Tensor, selection: Selection, layout: Layout) -> Tensor:
        """What each byte gains from the newest complete segment: [B, S, D] -> [B, L, D]."""
        u_BLD = self.unpool_norm(unpool(r_BSD, layout))
        if self.config.boundary_gradient == "confidence":
            scale = confidence_scale(selection.boundaries, selection.probs, selection.free)
            u_BLD = u_BLD * scale[..., None].to(u_BLD.dtype)
        return self.out_proj(u_BLD)
