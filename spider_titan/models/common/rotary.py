"""Rotary position embedding with YaRN's scaling (Peng et al. 2023, "YaRN", arXiv 2309.00071).

Letters: L positions, R rotary dims (even).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

# Rotations per original context below ALPHA are interpolated, above BETA left alone (section 3.2, values for LLaMA).
ALPHA, BETA = 1.0, 32.0


class Rotary(NamedTuple):
    """Rotation tables, fp32 [L, R/2] whatever the compute dtype."""

    cos: Tensor
    sin: Tensor


def yarn_frequencies(dim: int, *, theta: float, factor: float, original_length: int) -> Tensor:
    """Angular frequencies, float64 [dim/2] on the CPU, by the "NTK-by-parts" rule (eq. 17-20)."""
    with torch.device("cpu"):
        frequencies = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        rotations = original_length * frequencies / (2 * math.pi)
        keep = ((rotations - ALPHA) / (BETA - ALPHA)).clamp(0, 1)
        return (1 - keep) * frequencies / factor + keep * frequencies


def yarn_softmax_factor(factor: float) -> float:
    """What the attention logits are multiplied by: 1/t with sqrt(1/t) = 0.1 ln(factor) + 1 (eq. 22)."""
    return (0.1 * math.log(factor) + 1.0) ** 2 if factor > 1 else 1.0


def rotary_table(length: int, frequencies: Tensor, device: torch.device) -> Rotary:
    """Tables for positions 0 .. length - 1. Angles are computed in float64: at 2**18 fp32 is off by 0.01 rad."""
    positions = torch.arange(length, dtype=torch.float64, device=device)
    angles = positions[:, None] * _on_device(frequencies, device)
    return Rotary(angles.cos().float(), angles.sin().float())


@lru_cache(maxsize=32)
def _on_device(frequencies: Tensor, device: torch.device) -> Tensor:
    """A copy that is made once: at every forward it would wait for the device."""
    return frequencies.to(device)


def apply_rotary(x: Tensor, rotary: Rotary) -> Tensor:
    """Rotates neighbouring pairs of the last dim in fp32.

    Args:
        x: [B, L, H, R].
        rotary: Tables for the same L positions.

    Returns:
        [B, L, H, R] in x's dtype.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotary.cos[:, None], rotary.sin[:, None]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)
