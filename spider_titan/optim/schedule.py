"""The schedule of the learning rate."""

from __future__ import annotations

import math

from spider_titan.optim.config import DEFAULT_DECAY_RATIO, LRSchedulerConfig


def lr_factor(config: LRSchedulerConfig, step: int, total_steps: int) -> float:
    """Scheduled factor of the learning rate at ``step``, counted from 0; ``min_lr_factor`` from the last step on.

    A run that ends within its warm-up ends on the way up.
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    start = _decay_start(config, total_steps)
    progress = (step + 1 - start) / max(1, total_steps - start)
    progress = min(1.0, max(0.0, progress))
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress)) if config.decay == "cosine" else 1.0 - progress
    return config.min_lr_factor + (1.0 - config.min_lr_factor) * remaining


def _decay_start(config: LRSchedulerConfig, total_steps: int) -> int:
    """Steps at full rate or below it before the first that is decayed."""
    if config.decay != "wsd":
        return config.warmup_steps
    ratio = DEFAULT_DECAY_RATIO if config.decay_ratio is None else config.decay_ratio
    # A short run, or a long warm-up, leaves the decay fewer steps; it keeps at least one.
    decay_steps = max(1, round(ratio * total_steps))
    return max(config.warmup_steps, total_steps - decay_steps)
