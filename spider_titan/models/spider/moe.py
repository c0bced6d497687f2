"""SharedProjectionMoE: experts are low-rank gates on one shared up and down projection.

    a   = x W_up                                        D -> M, once per token
    g_e = (x W_gate[e]) W_transform[e]                  D -> r -> M, for the token's top-k experts
    out = (sum_e weight_e * silu(g_e) * a) W_down       M -> D, once per token

Tokens are sorted by expert and each expert's group is padded to a multiple of 16 rows, so the shapes are static, no
token is ever dropped, and one grouped matrix product serves all experts.

Letters: B rows, S slots, N = B * S tokens, K experts a token, A = N * K assignments, D hidden, M inner, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spider_titan.models.common.grouped import grouped_mm
from spider_titan.models.spider.config import SpiderConfig

# Grouped kernels want aligned groups. And a row of a matrix product may round differently in a product of few rows:
# without alignment, what a token gets would depend in its last bit on how many later tokens chose its expert.
GROUP_ALIGNMENT = 16


class RouterStats(NamedTuple):
    """Sums over a row's segments, fp32: what losses and metrics are made of. Leading dims are the layers' and loops'.

    Args:
        load_BE: Assignments of each expert.
        probs_BE: Router probabilities of each expert (with gradient).
        z_B: Squared log-partition (with gradient).
    """

    load_BE: Tensor
    probs_BE: Tensor
    z_B: Tensor


class Router(nn.Module):
    """fp32 softmax over the experts; the top k, renormalised.

    ``balance_bias`` is added to the probabilities for the selection alone and moves by rule (arXiv 2408.15664).
    """

    balance_bias: Tensor

    def __init__(self, config: SpiderConfig) -> None:
        super().__init__()
        self.top_k = config.experts_per_token
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("balance_bias", torch.zeros(config.num_experts, dtype=torch.float32))

    def forward(self, x_BSD: Tensor, filled_BS: Tensor) -> tuple[Tensor, Tensor, RouterStats]:
        """Chooses experts.

        Returns:
            weights fp32 [B, S, K] summing to 1, experts int64 [B, S, K], and statistics over filled slots.
        """
        logits = F.linear(x_BSD.float(), self.weight.float())
        probs = logits.softmax(-1)
        experts = (probs + self.balance_bias).topk(self.top_k, dim=-1).indices
        weights = probs.gather(-1, experts)
        weights = weights / weights.sum(-1, keepdim=True)
        real = filled_BS[..., None].float()
        chosen = torch.zeros_like(probs).scatter(-1, experts, 1.0)
        z_B = (logits.logsumexp(-1).square() * filled_BS).sum(-1)
        return weights, experts, RouterStats((chosen * real).sum(1), (probs * real).sum(1), z_B)

    @torch.no_grad()
    def balance(self, load_E: Tensor, rate: float) -> None:
        """Moves the bias one step towards experts with less than the mean load."""
        self.balance_bias.add_(rate * torch.sign(load_E.mean() - load_E).to(self.balance_bias))


class SharedProjectionMoE(nn.Module):
    """Mixture of low-rank gates over one shared SwiGLU-like projection pair; see the module's equations."""

    def __init__(self, config: SpiderConfig) -> None:
        super().__init__()
        dim, inner, rank, num_experts = (
            config.hidden_size,
            config.intermediate_size,
            config.expert_rank,
            config.num_experts,
        )
        self.router = Router(config)
        self.up_proj = nn.Linear(dim, inner, bias=False)
        self.W_gate = nn.Parameter(torch.empty(num_experts, dim, rank))
        self.W_transform = nn.Parameter(torch.empty(num_experts, rank, inner))
        self.down_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x_BSD: Tensor, filled_BS: Tensor) -> tuple[Tensor, RouterStats]:
        """[B, S, D], bool [B, S] -> [B, S, D] and the router's statistics."""
        weights, experts, stats = self.router(x_BSD, filled_BS)
        gate = self.expert_gate(x_BSD.flatten(0, 1), weights.flatten(0, 1), experts.flatten(0, 1))
        return self.down_proj(gate.view(*x_BSD.shape[:2], -1) * self.up_proj(x_BSD)), stats

    def expert_gate(self, x_ND: Tensor, weights_NK: Tensor, experts_NK: Tensor) -> Tensor:
        """``sum_e weight_e * silu(x W_gate[e] W_transform[e])``: [N, D] -> [N, M]."""
        num_tokens, top_k = experts_NK.shape
        slot_A, offsets_E, num_rows = dispatch(experts_NK.flatten(), self.W_gate.shape[0])
        token_A = torch.arange(num_tokens, device=x_ND.device).repeat_interleave(top_k)
        source = torch.zeros(num_rows, dtype=torch.int64, device=x_ND.device).scatter(0, slot_A, token_A)
        low = grouped_mm(x_ND.index_select(0, source), self.W_gate, offsets_E)
        gates = F.silu(grouped_mm(low, self.W_transform, offsets_E))
        gates_NKM = gates.index_select(0, slot_A).unflatten(0, (num_tokens, top_k))
        return (gates_NKM * weights_NK[..., None].to(gates.dtype)).sum(1)


def dispatch(experts_A: Tensor, num_experts: int) -> tuple[Tensor, Tensor, int]:
    """Places assignments in groups by expert, each group padded to ``GROUP_ALIGNMENT`` rows.

    Args:
        experts_A: int64 [A].
        num_experts: E.

    Returns:
        row of each assignment int64 [A], end of each group int32 [E], and the static number of rows; the rows that are
        left belong to the last group.
    """
    onehot_EA = experts_A == torch.arange(num_experts, device=experts_A.device)[:, None]
    count_E = onehot_EA.sum(-1)
    padded_E = (count_E + GROUP_ALIGNMENT - 1) // GROUP_ALIGNMENT * GROUP_ALIGNMENT
    ends_E = padded_E.cumsum(0)
    order = experts_A.argsort(stable=True)
    within_sorted = torch.arange(experts_A.numel(), device=experts_A.device)
    shift_E = (ends_E - padded_E) - (count_E.cumsum(0) - count_E)
    slot_A = torch.empty_like(order).scatter(0, order, within_sorted + shift_E[experts_A[order]])
    align = GROUP_ALIGNMENT
    num_rows = (experts_A.numel() + num_experts * (align - 1) + align - 1) // align * align
    ends_E = torch.cat((ends_E[:-1], ends_E.new_full((1,), num_rows)))
    return slot_A, ends_E.int(), num_rows
