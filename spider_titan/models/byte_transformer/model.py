"""The dense baseline: causal transformer blocks over bytes, the same blocks as Spider's prelude and coda.

Letters: B rows, L bytes, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from spider_titan.models.common.attention import attention_mask
from spider_titan.models.common.blocks import AttentionConfig, DenseBlock
from spider_titan.models.common.documents import check_row_length, document_numbers, visible_documents
from spider_titan.models.common.rotary import rotary_table, yarn_frequencies
from spider_titan.vocabulary import VOCAB_SIZE


@dataclass(frozen=True)
class ByteTransformerConfig:
    """Sizes. Every field is a key of ``[model]``."""

    hidden_size: int = 128
    """D, width of the residual stream."""
    num_heads: int = 4
    """Attention heads a layer."""
    num_layers: int = 7
    """Dense blocks."""
    intermediate_size: int = 256
    """Inner size of SwiGLU."""
    q_lora_rank: int = 64
    """Dims of the query latent."""
    kv_lora_rank: int = 32
    """Dims of the key/value latent."""
    qk_nope_head_dim: int = 32
    """Query/key dims a head without position."""
    qk_rope_head_dim: int = 16
    """Query/key dims a head with rotary position."""
    v_head_dim: int = 32
    """Value dims a head."""
    attention_window: int = 256
    """A query sees itself and the bytes before it within this window."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_original_length: int = 512
    """Context length before YaRN's extension."""
    rope_factor: float = 8.0
    """YaRN extension factor."""
    norm_eps: float = 1e-6
    """Added to the mean square in every RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of initial weights."""
    document_masking: bool = True
    """Whether attention stops at document starts."""

    @property
    def context_length(self) -> int:
        """Longest row in bytes."""
        return int(self.rope_original_length * self.rope_factor)

    @property
    def attention(self) -> AttentionConfig:
        """The attention sizes."""
        return AttentionConfig(
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            rope_factor=self.rope_factor,
            norm_eps=self.norm_eps,
        )


class ByteTransformer(nn.Module):
    """Embedding, dense blocks, norm, head."""

    def __init__(self, config: ByteTransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, config.hidden_size)
        self.layers = nn.ModuleList(
            DenseBlock(config.attention, config.intermediate_size) for _ in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, VOCAB_SIZE, bias=False)
        self.frequencies = yarn_frequencies(
            config.qk_rope_head_dim,
            theta=config.rope_theta,
            factor=config.rope_factor,
            original_length=config.rope_original_length,
        )

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [B, L] -> logits [B, L, V].

        Raises:
            ValueError: If the row is longer than the model's context.
        """
        length = ids.shape[1]
        check_row_length(ids, self.config.context_length)
        documents = document_numbers(ids)
        visible = visible_documents(documents, document_masking=self.config.document_masking)
        rotary = rotary_table(length, self.frequencies, ids.device)
        mask = attention_mask(visible, self.config.attention_window)
        x_BLD = self.embed_tokens(ids)
        for layer in self.layers:
            x_BLD = layer(x_BLD, rotary, mask)
        return self.lm_head(self.norm(x_BLD))
