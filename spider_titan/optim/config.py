"""The sections ``[optimizer]`` and ``[lr_scheduler]``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class OptimizerConfig:
    """The section ``[optimizer]``: AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101)."""

    name: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw keeps both averages in fp32, 8 bytes a parameter; adamw8bit keeps those of large matrices in 8 bits with a
    scale for every 256 values, 2 bytes a parameter, through torchao."""
    lr: float = 3e-4
    """Base learning rate; groups multiply it by factors of their own."""
    beta1: float = 0.9
    """Decay of the gradient's average."""
    beta2: float = 0.95
    """Decay of the squared gradient's average."""
    eps: float = 1e-8
    """Added to the root of the squared average."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the groups that decay."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Kernels of the fp32 update: fused is one kernel, foreach batches parameters, for-loop is the reference."""

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr = {self.lr} must be above 0")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} = {getattr(self, name)} is not in [0, 1)")
        if self.eps <= 0:
            raise ValueError(f"eps = {self.eps} must be above 0")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay = {self.weight_decay} is negative")


DEFAULT_DECAY_RATIO = 0.2


@dataclass(frozen=True)
class LRSchedulerConfig:
    """The section ``[lr_scheduler]``: linear warm-up, then a decay to ``min_lr_factor`` at the last step."""

    warmup_steps: int = 200
    """Steps until the full learning rate; the first step already has a share of it."""
    decay: Literal["cosine", "linear", "wsd"] = "cosine"
    """Fall after the warm-up: a cosine, a straight line, or (wsd: warm-up, stable, decay) the full rate and then a
    straight line over the last decay_ratio of the run."""
    decay_ratio: float | None = None
    """Share of all steps that decay = "wsd" falls over; unset: 0.2. Other decays have none."""
    min_lr_factor: float = 0.1
    """Learning rate of the last step as a factor of the full one."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps = {self.warmup_steps} is negative")
        if not 0.0 <= self.min_lr_factor <= 1.0:
            raise ValueError(f"min_lr_factor = {self.min_lr_factor} is not in [0, 1]")
        if self.decay_ratio is not None:
            if self.decay != "wsd":
                raise ValueError(
                    f'decay_ratio = {self.decay_ratio} is of decay = "wsd" alone, not of "{self.decay}"; '
                    "leave it unset, or choose wsd"
                )
            if not 0.0 < self.decay_ratio <= 1.0:
                raise ValueError(f"decay_ratio = {self.decay_ratio} is not in (0, 1]")
