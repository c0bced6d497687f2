"""Multi-head latent attention with YaRN, from the papers: loops over heads, full matrices, complex rotations."""

from __future__ import annotations

import cmath
import math

import torch
from torch import Tensor

from spider_titan.models.common.blocks import MultiHeadLatentAttention


def visible(query: int, key: int, window: int, documents: list[int]) -> bool:
    """Whether a query sees a key: itself and the ``window - 1`` positions before it, in its document."""
    return 0 <= query - key <= window - 1 and documents[query] == documents[key]


def visible_matrix(window: int, documents: Tensor) -> Tensor:
    """bool [B, L, L], entry by entry."""
    length = documents.shape[1]
    rows = [
        [[visible(query, key, window, numbers) for key in range(length)] for query in range(length)]
        for numbers in documents.tolist()
    ]
    return torch.tensor(rows)


def masked_softmax(scores: Tensor, seen: Tensor) -> Tensor:
    """Softmax of each row over what is seen."""
    exponentials = (scores - scores.masked_fill(~seen, -math.inf).amax(-1, keepdim=True)).exp() * seen
    return exponentials / exponentials.sum(-1, keepdim=True)


def yarn_angles(dim: int, theta: float, factor: float, original_length: int) -> list[float]:
    """Angle a position of each pair: NTK-by-parts, by wavelength (YaRN, section 3.2)."""
    angles = []
    for pair in range(dim // 2):
        base = theta ** (-2 * pair / dim)
        wavelength = 2 * math.pi / base
        ratio = original_length / wavelength
        if ratio < 1:
            ramp = 0.0
        elif ratio > 32:
            ramp = 1.0
        else:
            ramp = (ratio - 1) / (32 - 1)
        angles.append((1 - ramp) * base / factor + ramp * base)
    return angles


def rotate(x_LR: Tensor, angles: list[float]) -> Tensor:
    """Each pair of neighbours (x, y) times exp(i * position * angle), as complex numbers."""
    out = torch.empty_like(x_LR)
    for position in range(x_LR.shape[0]):
        for pair, angle in enumerate(angles):
            value = complex(*x_LR[position, 2 * pair : 2 * pair + 2].tolist()) * cmath.exp(1j * position * angle)
            out[position, 2 * pair], out[position, 2 * pair + 1] = value.real, value.imag
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.to(x.dtype)


def latent_attention(
    module: MultiHeadLatentAttention,
    x_LD: Tensor,
    angles: list[float],
    factor: float,
    window: int,
    documents: list[int],
) -> Tensor:
    """float64 [L, D] -> [L, D] for one row."""
    c = module.config
    nope, rope, value = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
    weights = {name: parameter.detach().double() for name, parameter in module.named_parameters()}
    q_latent = rms_norm(x_LD @ weights["q_down.weight"].T, weights["q_norm.weight"], c.norm_eps)
    compressed = x_LD @ weights["kv_down.weight"].T
    kv_latent = rms_norm(compressed[:, : c.kv_lora_rank], weights["kv_norm.weight"], c.norm_eps)
    shared_key = rotate(compressed[:, c.kv_lora_rank :], angles)
    temperature = 1 / (0.1 * math.log(factor) + 1) ** 2
    seen = visible_matrix(window, torch.tensor([documents]))[0]
    heads = []
    for head in range(c.num_heads):
        q = q_latent @ weights["q_up.weight"][head * (nope + rope) : (head + 1) * (nope + rope)].T
        kv = kv_latent @ weights["kv_up.weight"][head * (nope + value) : (head + 1) * (nope + value)].T
        scores = q[:, :nope] @ kv[:, :nope].T + rotate(q[:, nope:], angles) @ shared_key.T
        probs = masked_softmax(scores / (temperature * math.sqrt(nope + rope)), seen)
        heads.append(probs @ kv[:, nope:])
    return torch.cat(heads, dim=-1) @ weights["o_proj.weight"].T
