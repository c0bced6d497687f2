"""The recurrent core: six layers over segments, looped T times, with LTI injection and adaptive computation time.

    y = RMSNorm(h + e + loop_embedding[t]);  y = layers(y);  y = y + lora(y, t)
    h = A * h + Bv * e + y
    p_t = sigmoid(halt_predictor(h));  output = sum_t w_t h_t

Letters: B rows, S slots, D hidden, T loops, E experts.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider_titan.models.common.attention import AttentionMask
from spider_titan.models.common.blocks import MultiHeadLatentAttention
from spider_titan.models.common.rotary import Rotary
from spider_titan.models.spider.config import SpiderConfig
from spider_titan.models.spider.engram import EngramGate, Memory
from spider_titan.models.spider.moe import Router, RouterStats, SharedProjectionMoE

# exp(-exp(x)) in fp32 is neither 0 nor 1 within these bounds.
MIN_LOG_RATE, MAX_LOG_RATE = -16.0, 4.0


class LoopSums(NamedTuple):
    """Sums over the filled slots of all rows, without gradient: what metrics are made of.

    Args:
        hidden_norm_T: fp32, Euclidean norm of the state after each loop.
        halting_T: fp32, halting weight of each loop.
        engram_norm_TG: fp32, Euclidean norm of what each of the G layers with a memory adds.
        grad_squares_T: float64, squares of the gradient of the state after each loop. Zero until the backward, which
            fills it in.
    """

    hidden_norm_T: Tensor
    halting_T: Tensor
    engram_norm_TG: Tensor
    grad_squares_T: Tensor


class CoreOutput(NamedTuple):
    """What the loops produce.

    Args:
        r: [B, S, D], the halting-weighted sum of the loops' states.
        ponder: fp32 [B, S], expected number of loops (with gradient).
        router: Statistics stacked over loops and layers, leading dim T * layers.
        loops: Statistics of the loops.
    """

    r: Tensor
    ponder: Tensor
    router: RouterStats
    loops: LoopSums


class RecurrentLayer(nn.Module):
    """Pre-norm residual layer: attention over segments, then the mixture of experts."""

    def __init__(self, config: SpiderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attention = MultiHeadLatentAttention(config.attention)
        self.moe_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.moe = SharedProjectionMoE(config)

    def forward(
        self, y_BSD: Tensor, rotary: Rotary, mask: AttentionMask, filled_BS: Tensor
    ) -> tuple[Tensor, RouterStats]:
        """[B, S, D] -> [B, S, D] and the router's statistics."""
        y_BSD = y_BSD + self.attention(self.attention_norm(y_BSD), rotary, mask)
        out, stats = self.moe(self.moe_norm(y_BSD), filled_BS)
        return y_BSD + out, stats


class LTIInjection(nn.Module):
    """``A * h + Bv * e + y`` with A = exp(-exp(log_dt + log_a)) per channel: stable whatever is learned."""

    def __init__(self, config: SpiderConfig) -> None:
        super().__init__()
        self.log_dt = nn.Parameter(torch.empty(1))
        self.log_a = nn.Parameter(torch.empty(config.hidden_size))
        self.Bv = nn.Parameter(torch.empty(config.hidden_size))

    def decay(self) -> Tensor:
        """A, fp32 [D], strictly between 0 and 1."""
        log_rate = self.log_dt.float() + self.log_a.float()
        return torch.exp(-torch.exp(log_rate.clamp(MIN_LOG_RATE, MAX_LOG_RATE)))

    def forward(self, h_BSD: Tensor, e_BSD: Tensor, y_BSD: Tensor) -> Tensor:
        """Next state, in y's dtype; computed in fp32, where A does not round to 1."""
        state = self.decay() * h_BSD.float() + self.Bv.float() * e_BSD.float() + y_BSD.float()
        return state.to(y_BSD.dtype)


class LoopAdapter(nn.Module):
    """Low-rank adapter with shared projections and a scale vector a loop (after Bae et al. 2024, arXiv 2410.20672)."""

    def __init__(self, config: SpiderConfig) -> None:
        super().__init__()
        self.down_proj = nn.Linear(config.hidden_size, config.lora_rank, bias=False)
        self.scale = nn.Embedding(config.num_loops, config.lora_rank)
        self.up_proj = nn.Linear(config.lora_rank, config.hidden_size, bias=False)

    def forward(self, y_BSD: Tensor, loop: Tensor) -> Tensor:
        """[B, S, D], int64 scalar -> [B, S, D]."""
        return self.up_proj(self.down_proj(y_BSD) * self.scale(loop))


class RecurrentCore(nn.Module):
    """All loops in one module, so that sharded weights are gathered once however many loops run."""

    def __init__(self, config: SpiderConfig) -> None:
        super().__init__()
        self.num_loops = config.num_loops
        self.backprop_loops = config.backprop_loops
        self.act_epsilon = config.act_epsilon
        self.loop_embedding = nn.Embedding(config.num_loops, config.hidden_size)
        self.input_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.layers = nn.ModuleList(RecurrentLayer(config) for _ in range(config.num_recurrent_layers))
        self.engram_gates = nn.ModuleDict({str(layer): EngramGate(config) for layer in config.engram_layers})
        self.adapter = LoopAdapter(config)
        self.injection = LTIInjection(config)
        self.halt_predictor = nn.Linear(config.hidden_size, 1)

    def forward(
        self,
        z_BSD: Tensor,
        rotary: Rotary,
        mask: AttentionMask,
        filled_BS: Tensor,
        memories: dict[str, Memory],
        conv_mask: Tensor,
        num_loops: int,
    ) -> CoreOutput:
        """Runs exactly ``num_loops`` loops; gradients pass through the last ``backprop_loops`` of them.

        Args:
            z_BSD: Pooled segments; slot 0 is the null slot.
            rotary: Tables for S positions.
            mask: Attention mask over slots.
            filled_BS: bool, slots that hold a segment: those that statistics count.
            memories: By layer, from ``Engram``.
            conv_mask: From ``engram.conv_mask``.
            num_loops: Loops to run; beyond the trained number the last loop's embedding and scale are used.
        """
        h_BSD = z_BSD
        probs, states, stats, norms = [], [], [], []
        grad_squares_T = torch.zeros(num_loops, dtype=torch.float64, device=z_BSD.device)
        first_with_gradient = max(0, num_loops - self.backprop_loops) if self.backprop_loops else 0
        for t in range(num_loops):
            with torch.set_grad_enabled(torch.is_grad_enabled() and t >= first_with_gradient):
                # Filled on the device: a number that is copied there would wait for it.
                loop = torch.full((), min(t, self.num_loops - 1), dtype=torch.int64, device=z_BSD.device)
                y_BSD = self.input_norm(h_BSD + z_BSD + self.loop_embedding(loop))
                for index, layer in enumerate(self.layers):
                    if str(index) in self.engram_gates:
                        recalled_BSD = self.engram_gates[str(index)](y_BSD, memories[str(index)], conv_mask)
                        norms.append(sum_of_norms(recalled_BSD, filled_BS))
                        y_BSD = y_BSD + recalled_BSD
                    y_BSD, layer_stats = layer(y_BSD, rotary, mask, filled_BS)
                    stats.append(layer_stats)
                y_BSD = y_BSD + self.adapter(y_BSD, loop)
                h_BSD = self.injection(h_BSD, z_BSD, y_BSD)
                if h_BSD.requires_grad:
                    h_BSD.register_hook(partial(keep_square, grad_squares_T[t], filled_BS))
                states.append(h_BSD)
                norms.append(sum_of_norms(h_BSD, filled_BS))
                probs.append(self.halting_probability(h_BSD))
        weights = act_weights(torch.stack(probs), self.act_epsilon)
        r_BSD = sum(weight[..., None] * state.float() for weight, state in zip(weights, states, strict=True))
        loops = torch.arange(1, num_loops + 1, device=z_BSD.device)[:, None, None]
        router = RouterStats(*(torch.stack(parts) for parts in zip(*stats, strict=True)))
        *engram_norms, hidden_norm_T = torch.stack(norms).view(num_loops, -1).unbind(1)
        engram_norm_TG = torch.stack(engram_norms, 1) if engram_norms else hidden_norm_T.new_zeros(num_loops, 0)
        sums = LoopSums(hidden_norm_T, (weights.detach() * filled_BS).sum((1, 2)), engram_norm_TG, grad_squares_T)
        return CoreOutput(r_BSD.to(z_BSD.dtype), (weights * loops).sum(0), router, sums)

    def routers(self) -> list[Router]:
        """The routers of the layers, in order."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def halting_probability(self, h_BSD: Tensor) -> Tensor:
        """fp32 [B, S]."""
        halt = self.halt_predictor
        return F.linear(h_BSD.float(), halt.weight.float(), halt.bias.float()).squeeze(-1).sigmoid()


def sum_of_norms(x_BSD: Tensor, filled_BS: Tensor) -> Tensor:
    """Sum of the vectors' Euclidean norms over filled slots: fp32 scalar without gradient."""
    return (torch.linalg.vector_norm(x_BSD.detach(), dim=-1, dtype=torch.float32) * filled_BS).sum()


def keep_square(place: Tensor, filled_BS: Tensor, grad_BSD: Tensor) -> None:
    """Writes the sum of the gradient's squares over filled slots into ``place``, a scalar."""
    norms_BS = torch.linalg.vector_norm(grad_BSD, dim=-1, dtype=torch.float32)
    place.copy_((norms_BS.square() * filled_BS).sum())


def act_weights(probs_TBS: Tensor, epsilon: float) -> Tensor:
    """Halting weights (Graves 2016, arXiv 1603.08983, eq. 6-7).

    A loop's weight is its probability while the running sum stays below 1 - epsilon, what is left of 1 at the loop that
    reaches it (or at the last), and 0 afterwards. A position's weights sum to 1 exactly.

    Args:
        probs_TBS: fp32 [T, B, S].
        epsilon: ACT's epsilon.

    Returns:
        fp32 [T, B, S].
    """
    running = torch.zeros_like(probs_TBS[0])
    active = torch.ones_like(running, dtype=torch.bool)
    weights = []
    last = probs_TBS.shape[0] - 1
    for t, probs in enumerate(probs_TBS):
        halts = active & (running + probs >= 1.0 - epsilon) if t < last else active
        weight = torch.where(halts, 1.0 - running, torch.where(active, probs, 0.0))
        running = running + weight
        active = active & ~halts
        weights.append(weight)
    return torch.stack(weights)
