"""How many loops a training step runs: always the same, or drawn anew every step."""

from __future__ import annotations

import hashlib
import math

from spider_titan.models.spider.config import SpiderConfig


def draw_loops(config: SpiderConfig, seed: int, step: int) -> int:
    """T of a training step: a function of its arguments alone, so all ranks and every repetition agree.

    With ``sample_loops = "poisson"`` it is 1 + Poisson(num_loops - 1), at most ``max_loops``: the mean is
    ``num_loops``, less what the bound cuts off.
    """
    if config.sample_loops == "none":
        return config.num_loops
    most, rate = max_loops(config), config.num_loops - 1
    digest = hashlib.sha256(f"loops {seed} {step}".encode()).digest()
    uniform = int.from_bytes(digest[:8], "big") / 2**64
    # The inverse of the distribution function: library generators may draw other numbers in another release.
    extra, mass = 0, math.exp(-rate)
    below = mass
    while uniform >= below and extra + 1 < most:
        extra += 1
        mass *= rate / extra
        below += mass
    return 1 + extra


def max_loops(config: SpiderConfig) -> int:
    """The most loops that a training step runs."""
    if config.sample_loops == "none":
        return config.num_loops
    return config.max_sampled_loops or 2 * config.num_loops
