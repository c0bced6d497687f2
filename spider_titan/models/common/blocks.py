"""The dense transformer block: multi-head latent attention and SwiGLU.

Letters: B rows, L positions, D hidden, H heads, M inner size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider_titan.models.common.attention import AttentionMask, windowed_attention
from spider_titan.models.common.rotary import Rotary, apply_rotary, yarn_softmax_factor


@dataclass(frozen=True)
class AttentionConfig:
    """Sizes of multi-head latent attention and the reach of its positions."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_factor: float
    norm_eps: float

    @property
    def qk_head_dim(self) -> int:
        """Query and key dims a head: without and with position."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class MultiHeadLatentAttention(nn.Module):
    """Attention whose keys and values come from one small latent (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Queries pass through a low-rank latent with a norm. Keys and values pass through another, and all heads share one
    rotary key. The YaRN softmax factor multiplies the whole logit.
    """

    def __init__(self, config: AttentionConfig) -> None:
        super().__init__()
        c = self.config = config
        self.scale = yarn_softmax_factor(c.rope_factor) * c.qk_head_dim**-0.5
        self.q_down = nn.Linear(c.hidden_size, c.q_lora_rank, bias=False)
        self.q_norm = nn.RMSNorm(c.q_lora_rank, eps=c.norm_eps)
        self.q_up = nn.Linear(c.q_lora_rank, c.num_heads * c.qk_head_dim, bias=False)
        self.kv_down = nn.Linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(c.kv_lora_rank, eps=c.norm_eps)
        self.kv_up = nn.Linear(c.kv_lora_rank, c.num_heads * (c.qk_nope_head_dim + c.v_head_dim), bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.v_head_dim, c.hidden_size, bias=False)

    def forward(self, x_BLD: Tensor, rotary: Rotary, mask: AttentionMask) -> Tensor:
        """[B, L, D] -> [B, L, D]."""
        c = self.config
        q = self.q_up(self.q_norm(self.q_down(x_BLD))).unflatten(-1, (c.num_heads, -1))
        q_nope, q_rope = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        latent, k_rope = self.kv_down(x_BLD).split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).unflatten(-1, (c.num_heads, -1))
        k_nope, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        # One rotation for all heads' queries and the key that they share.
        rotated = apply_rotary(torch.cat((q_rope, k_rope.unsqueeze(2)), dim=2), rotary)
        q_rope, k_rope = rotated.split((c.num_heads, 1), dim=2)
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, c.num_heads, -1)), dim=-1)
        out = windowed_attention(q, k, v, mask, self.scale)
        return self.o_proj(out.flatten(-2))


class SwiGLU(nn.Module):
    """``(silu(x W_gate) * x W_up) W_down`` (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DenseBlock(nn.Module):
    """Pre-norm residual block: attention, then SwiGLU."""

    def __init__(self, attention: AttentionConfig, intermediate_size: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(attention.hidden_size, eps=attention.norm_eps)
        self.attention = MultiHeadLatentAttention(attention)
        self.mlp_norm = nn.RMSNorm(attention.hidden_size, eps=attention.norm_eps)
        self.mlp = SwiGLU(attention.hidden_size, intermediate_size)

    def forward(self, x_BLD: Tensor, rotary: Rotary, mask: AttentionMask) -> Tensor:
        """[B, L, D] -> [B, L, D]."""
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), rotary, mask)
        return x_BLD + self.mlp(self.mlp_norm(x_BLD))
