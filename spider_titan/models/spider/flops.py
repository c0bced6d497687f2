"""FLOPs of Spider: matrix products and attention, a multiply-add counted as 2."""

from __future__ import annotations

from dataclasses import replace

from spider_titan.models.common.flops import dense_block_flops, latent_attention_flops
from spider_titan.models.spider.config import SpiderConfig
from spider_titan.vocabulary import VOCAB_SIZE


def flops_per_byte(config: SpiderConfig, seq_len: int, slots_per_byte: float | None = None) -> float:
    """FLOPs of a forward a byte of input.

    Args:
        config: Sizes.
        seq_len: L, bytes a row.
        slots_per_byte: Share of bytes that the core works on; default: the target boundary rate.
    """
    rate = config.boundary_rate if slots_per_byte is None else slots_per_byte
    dim = config.hidden_size
    dense_layers = config.num_prelude_layers + config.num_coda_layers
    dense = dense_layers * dense_block_flops(
        config.attention, config.intermediate_size, context=min(config.attention_window, seq_len)
    )
    predictor = 2 * (dim * dim + dim)
    heads = 2 * (dim * VOCAB_SIZE + dim * dim)
    return (
        dense + predictor + heads + rate * flops_per_slot(config, context=min(config.attention_window, rate * seq_len))
    )


def training_flops_per_byte(config: SpiderConfig, seq_len: int, num_loops: int | None = None) -> float:
    """FLOPs a byte of forward and backward, which has twice those of the part of the forward that it goes through.

    Args:
        config: Sizes, and ``backprop_loops``.
        seq_len: L, bytes a row.
        num_loops: Loops of the step; default: those of the config.
    """
    loops = num_loops or config.num_loops
    forward = flops_per_byte(replace(config, num_loops=loops), seq_len)
    no_backward = max(0, loops - config.backprop_loops) if config.backprop_loops else 0
    rate = config.boundary_rate
    loop = rate * flops_per_loop(config, context=min(config.attention_window, rate * seq_len))
    return 3 * forward - 2 * no_backward * loop


def flops_per_slot(config: SpiderConfig, context: float) -> float:
    """FLOPs of the memory look-up and all loops of the core for one slot that attends to ``context`` slots."""
    memory_dim = len(config.engram_orders) * config.engram_heads * config.engram_head_dim
    memory = len(config.engram_layers) * 2 * 2 * memory_dim * config.hidden_size
    return config.num_loops * flops_per_loop(config, context) + memory


def flops_per_loop(config: SpiderConfig, context: float) -> float:
    """FLOPs of one loop of the core for one slot that attends to ``context`` slots."""
    dim, inner, rank = config.hidden_size, config.intermediate_size, config.expert_rank
    router = 2 * dim * config.num_experts
    experts = 2 * config.experts_per_token * (dim * rank + rank * inner)
    layer = latent_attention_flops(config.attention, context=context) + router + experts + 2 * 2 * dim * inner
    adapter = 2 * 2 * dim * config.lora_rank
    return config.num_recurrent_layers * layer + adapter + 2 * dim
