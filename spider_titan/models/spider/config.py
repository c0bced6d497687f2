"""Hyper-parameters of Spider and its flavors. Every field is a key of ``[model]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spider_titan.models.common.blocks import AttentionConfig


@dataclass(frozen=True)
class SpiderConfig:
    """Sizes, and the choices that the model's equations leave open."""

    hidden_size: int = 128
    """D, width of the residual stream."""
    num_heads: int = 4
    """Attention heads a layer."""
    num_prelude_layers: int = 2
    """Dense blocks over bytes before the recurrent core."""
    num_recurrent_layers: int = 6
    """Layers of the recurrent core, over segments."""
    num_coda_layers: int = 2
    """Dense blocks over bytes after the recurrent core."""
    num_loops: int = 2
    """T, times the recurrent core is applied in training; evaluation may use another number."""
    sample_loops: Literal["none", "poisson"] = "none"
    """Whether every training step draws its own number of loops, with the mean num_loops; all ranks draw the same."""
    max_sampled_loops: int = 0
    """The most loops that sample_loops may draw; 0 = twice num_loops."""
    backprop_loops: int = 0
    """Loops, counted from the last, that gradients pass through; earlier ones only compute. 0 = all."""
    intermediate_size: int = 256
    """M, inner size of the dense blocks' SwiGLU and of the shared projections of the mixture of experts."""
    num_experts: int = 8
    """E, experts a recurrent layer."""
    experts_per_token: int = 2
    """Experts a segment is routed to."""
    expert_rank: int = 16
    """r, rank of an expert's gate."""
    q_lora_rank: int = 64
    """Dims of the query latent."""
    kv_lora_rank: int = 32
    """Dims of the key/value latent, which is what decoding caches."""
    qk_nope_head_dim: int = 32
    """Query/key dims a head without position."""
    qk_rope_head_dim: int = 16
    """Query/key dims a head with rotary position; the key's are shared by all heads."""
    v_head_dim: int = 32
    """Value dims a head."""
    engram_layers: tuple[int, ...] = (1, 4)
    """Recurrent layers (from 0) before which the n-gram memory is added."""
    engram_orders: tuple[int, ...] = (3, 5, 8)
    """Lengths n of the byte n-grams that are looked up."""
    engram_heads: int = 2
    """Hash heads an order."""
    engram_slots: int = 4096
    """Table rows a head: the first prime above this number that no other head has."""
    engram_head_dim: int = 16
    """Dims a table row."""
    attention_window: int = 256
    """W: a query sees itself and the W - 1 positions before it: bytes in prelude and coda, segments in the core."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rope_original_length: int = 512
    """Context length before YaRN's extension."""
    rope_factor: float = 8.0
    """YaRN extension factor; original length x factor is the longest row that may be trained or evaluated."""
    norm_eps: float = 1e-6
    """Added to the mean square in every RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of initial weights."""
    lora_rank: int = 8
    """Rank of the per-loop adapter."""
    act_epsilon: float = 0.01
    """A position halts once its halting probabilities sum to 1 - act_epsilon."""
    act_ponder_weight: float = 0.0
    """Weight of the expected number of loops in the loss; 0 = off."""
    router_aux_weight: float = 0.01
    """Weight of the load-balance loss."""
    router_z_weight: float = 0.0
    """Weight of the router's z-loss (mean squared log-partition); 0 = off."""
    router_bias_rate: float = 0.0
    """Step of the bias that steers selection, not weights, towards idle experts (arXiv 2408.15664); 0 = off."""
    document_masking: bool = True
    """Whether attention, pooling and convolution stop at document starts."""
    bytes_per_segment: float = 3.3
    """Target mean length of a segment; its inverse is the target boundary rate."""
    boundary_gradient: Literal["confidence", "cumsum", "none"] = "confidence"
    """How the language-model loss reaches the boundary probabilities; the values never change."""
    boundary_fixed_target: Literal["selection", "rate"] = "selection"
    """What boundary probabilities learn in fixed phases: the step's own selection, or the uniform target rate."""
    boundary_adaptive_loss: Literal["binomial", "hinge"] = "binomial"
    """What holds the rate in adaptive phases: a binomial prior, or a hinge, free within a band below the target."""
    boundary_hinge_width: float = 3.0
    """Width of the hinge's free band, in standard deviations of a binomial rate."""
    boundary_weight: float = 1.0
    """Weight of the boundary loss."""
    boundary_binomial_weight: float = 0.1
    """Weight of the binomial (or hinge) term within the boundary loss."""
    boundary_bias_decay: float = 0.9
    """Decay a step of the averages that the boundary bias follows."""
    boundary_bias_gain: float = 1.0
    """How fast the bias counters a drift of the global rate in adaptive phases; 0 = off."""
    boundary_lr_factor: float = 1.0
    """Learning rate of the boundary predictor, as a factor of the base rate."""
    engram_lr_factor: float = 5.0
    """Learning rate of the n-gram tables, as a factor of the base rate."""
    expert_max_norm: float = 0.5
    """Gradient norm bound of the expert cores, applied after the global one."""

    def __post_init__(self) -> None:
        if self.hidden_size < 1 or self.num_loops < 1:
            raise ValueError("hidden_size and num_loops must be at least 1")
        if self.backprop_loops < 0:
            raise ValueError(f"backprop_loops = {self.backprop_loops} must be at least 1, or 0 for all loops")
        if self.max_sampled_loops and self.sample_loops == "none":
            raise ValueError(
                f'max_sampled_loops = {self.max_sampled_loops} bounds a draw, but sample_loops = "none"; remove it, '
                'or set sample_loops = "poisson"'
            )
        if self.max_sampled_loops and self.max_sampled_loops < self.num_loops:
            raise ValueError(
                f"max_sampled_loops = {self.max_sampled_loops} must be at least num_loops = {self.num_loops}, or 0"
            )
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim = {self.qk_rope_head_dim} must be even: positions rotate pairs")
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} must be between 1 and num_experts = {self.num_experts}"
            )
        for name in ("hidden_size", "intermediate_size", "expert_rank"):
            if getattr(self, name) % 8:
                raise ValueError(f"{name} = {getattr(self, name)} must be a multiple of 8, for grouped matrix products")
        outside = [layer for layer in self.engram_layers if not 0 <= layer < self.num_recurrent_layers]
        if outside:
            raise ValueError(
                f"engram_layers names layer {outside[0]}, but num_recurrent_layers = {self.num_recurrent_layers}"
            )
        if not self.engram_orders or min(self.engram_orders) < 1:
            raise ValueError(f"engram_orders = {self.engram_orders} must hold lengths of at least 1")
        if self.bytes_per_segment <= 1.0:
            raise ValueError(f"bytes_per_segment = {self.bytes_per_segment} must be above 1")

    @property
    def context_length(self) -> int:
        """Longest row in bytes."""
        return int(self.rope_original_length * self.rope_factor)

    @property
    def boundary_rate(self) -> float:
        """Target share of bytes that close a segment."""
        return 1.0 / self.bytes_per_segment

    @property
    def applied_depth(self) -> int:
        """Layers a byte's signal passes, loops unrolled; scales the initial output projections."""
        return self.num_prelude_layers + self.num_loops * self.num_recurrent_layers + self.num_coda_layers

    @property
    def attention(self) -> AttentionConfig:
        """The attention sizes, common to all layers."""
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


FLAVORS = {
    "debug": SpiderConfig(),
    "100m": SpiderConfig(
        hidden_size=768,
        num_heads=12,
        num_loops=4,
        intermediate_size=1536,
        num_experts=32,
        expert_rank=64,
        q_lora_rank=384,
        kv_lora_rank=192,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        engram_heads=4,
        engram_slots=32768,
        engram_head_dim=32,
        attention_window=4096,
        rope_original_length=8192,
        lora_rank=32,
        boundary_lr_factor=0.1,
    ),
    "10b": SpiderConfig(
        hidden_size=2048,
        num_heads=16,
        num_loops=6,
        intermediate_size=6144,
        num_experts=32,
        expert_rank=256,
        q_lora_rank=768,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        engram_heads=4,
        engram_slots=131072,
        engram_head_dim=64,
        attention_window=8192,
        rope_original_length=32768,
        lora_rank=64,
        boundary_lr_factor=0.1,
    ),
}
