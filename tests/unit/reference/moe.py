"""The mixture of low-rank gates, one token and one expert at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class MoEWeights(NamedTuple):
    """float64 copies of a layer's parameters that take gradients."""

    router: Tensor
    up: Tensor
    gate: Tensor
    transform: Tensor
    down: Tensor


def softmax(logits: Tensor) -> Tensor:
    exponentials = (logits - logits.max()).exp()
    return exponentials / exponentials.sum()


def moe_token(x_D: Tensor, w: MoEWeights, top_k: int, bias_E: Tensor) -> tuple[Tensor, list[int]]:
    """[D] -> [D], and the experts that were chosen, best first."""
    probs = softmax(w.router @ x_D)
    chosen = sorted(range(len(probs)), key=lambda e: -float((probs[e] + bias_E[e]).detach()))[:top_k]
    total = sum(probs[e] for e in chosen)
    a = w.up @ x_D
    mixed = torch.zeros_like(a)
    for e in chosen:
        g = (x_D @ w.gate[e]) @ w.transform[e]
        mixed = mixed + probs[e] / total * (g / (1 + (-g).exp())) * a
    return w.down @ mixed, chosen
