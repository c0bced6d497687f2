"""Forward FLOPs of the common parts for one position; a multiply-add counts as 2."""

from __future__ import annotations

from spider_titan.models.common.blocks import AttentionConfig


def latent_attention_flops(config: AttentionConfig, *, context: float) -> float:
    """Multi-head latent attention of one query over ``context`` keys."""
    c = config
    projections = (
        c.hidden_size * c.q_lora_rank
        + c.q_lora_rank * c.num_heads * c.qk_head_dim
        + c.hidden_size * (c.kv_lora_rank + c.qk_rope_head_dim)
        + c.kv_lora_rank * c.num_heads * (c.qk_nope_head_dim + c.v_head_dim)
        + c.num_heads * c.v_head_dim * c.hidden_size
    )
    return 2 * projections + 2 * c.num_heads * (c.qk_head_dim + c.v_head_dim) * context


def dense_block_flops(config: AttentionConfig, intermediate_size: int, *, context: float) -> float:
    """A dense block: attention over ``context`` keys, and SwiGLU."""
    return latent_attention_flops(config, context=context) + 2 * 3 * config.hidden_size * intermediate_size
