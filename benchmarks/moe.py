"""The mixture of experts: one grouped matrix product for all experts against a loop over the experts.

Both share the router and the big up and down projection; the loop picks each expert's tokens, runs its gate, and adds
the result back. Forward and backward.

Letters: N tokens, K experts a token, D hidden, M inner, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
import tyro
from timing import medians, milliseconds, print_table, relative_difference, start
from torch import Tensor

from spider_titan.models.spider.config import FLAVORS, SpiderConfig
from spider_titan.models.spider.moe import SharedProjectionMoE


def grouped(moe: SharedProjectionMoE, x_1ND: Tensor) -> Tensor:
    """The model's own way."""
    return moe(x_1ND, torch.ones(x_1ND.shape[:2], dtype=torch.bool))[0]


def looped(moe: SharedProjectionMoE, x_1ND: Tensor) -> Tensor:
    """One expert after the other."""
    weights, experts, _ = moe.router(x_1ND, torch.ones(x_1ND.shape[:2], dtype=torch.bool))
    x_ND, weights_NK, experts_NK = x_1ND[0], weights[0], experts[0]
    gate_NM = x_ND.new_zeros(x_ND.shape[0], moe.up_proj.out_features)
    for expert in range(moe.W_gate.shape[0]):
        token, choice = (experts_NK == expert).nonzero(as_tuple=True)
        gate = F.silu(x_ND[token] @ moe.W_gate[expert] @ moe.W_transform[expert])
        gate_NM.index_add_(0, token, gate * weights_NK[token, choice, None])
    return moe.down_proj(gate_NM * moe.up_proj(x_ND))[None]


def build(config: SpiderConfig) -> SharedProjectionMoE:
    """A layer with normal weights, scaled so that what every projection puts out is of size 1."""
    moe = SharedProjectionMoE(config)
    for parameter in moe.parameters():
        # W_gate and W_transform are applied from the right: their input dim is the one before the last.
        fan_in = parameter.shape[-2] if parameter.ndim == 3 else parameter.shape[-1]
        torch.nn.init.normal_(parameter, std=fan_in**-0.5)
    return moe


def measure(config: SpiderConfig, tokens: int, repetitions: int) -> list[str]:
    """One row of the table."""
    moe = build(config)
    x = torch.randn(1, tokens, config.hidden_size, requires_grad=True)
    upstream = torch.randn_like(x)

    def results(way: Callable[[SharedProjectionMoE, Tensor], Tensor]) -> list[Tensor]:
        out = way(moe, x)
        return [out, *torch.autograd.grad(out, (x, *moe.parameters()), upstream)]

    by_group, by_loop = results(grouped), results(looped)
    of_gradients = max(relative_difference(a, b) for a, b in zip(by_group[1:], by_loop[1:], strict=True))
    seconds = medians({"grouped": lambda: results(grouped), "looped": lambda: results(looped)}, repetitions=repetitions)
    return [
        f"{config.hidden_size} / {config.intermediate_size} / {config.expert_rank}",
        milliseconds(seconds["grouped"]),
        milliseconds(seconds["looped"]),
        f"{seconds['looped'] / seconds['grouped']:.2f}x",
        f"{float((by_group[0] - by_loop[0]).detach().abs().max()):.0e}",
        f"{of_gradients:.0e}",
    ]


def main(
    flavors: tuple[str, ...] = ("debug", "100m"),
    experts: int = 32,
    tokens: int = 4096,
    repetitions: int = 9,
    threads: int = 1,
) -> None:
    """Measures both ways, and how far apart outputs and gradients are.

    Args:
        flavors: Whose sizes D, M and r the layer has.
        experts: E.
        tokens: N.
        repetitions: Calls of each way and flavor.
        threads: CPU threads.
    """
    start(
        f"mixture of {experts} experts, {tokens} tokens, forward and backward", threads=threads, repetitions=repetitions
    )
    torch.manual_seed(0)
    rows = [measure(replace(FLAVORS[flavor], num_experts=experts), tokens, repetitions) for flavor in flavors]
    print_table(
        ["D / M / r", "grouped ms", "loop ms", "loop / grouped", "outputs, absolute", "gradients, relative"], rows
    )


if __name__ == "__main__":
    tyro.cli(main)
