"""The section ``[precision]``: what blocks compute in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class PrecisionConfig:
    """The section ``[precision]``."""

    mode: Literal["fp32", "bf16", "fp8_dynamic"] = "fp32"
    """What blocks compute in; fp8_dynamic: bf16, and their linears in float8 with scales taken from each tensor. Master
    weights, optimizer state and the reduction of gradients are fp32 in all."""
    fp8_recipe: Literal["rowwise", "tensorwise"] = "rowwise"
    """float8 scales: one for each row and column of a product (more accurate), or one a tensor (faster)."""
    fp8_all_gather: bool = False
    """Gather the weights of float8 linears as float8, half the bytes of bf16; needs fp8_recipe = "tensorwise"."""
    emulate: bool = False
    """Round to float8 but multiply in fp32: the numerics without the speed, on devices without float8 products."""
    fp8_skip: tuple[str, ...] = ()
    """Linears to keep in bf16: patterns over full names, such as "coda.1.*" or "*.attention.kv_down"."""

    def __post_init__(self) -> None:
        if self.fp8_all_gather and self.fp8_recipe != "tensorwise":
            raise ValueError(
                f'fp8_all_gather = true does not go with fp8_recipe = "{self.fp8_recipe}": a gathered weight has one '
                'scale; set fp8_recipe = "tensorwise", or fp8_all_gather = false'
            )

    @property
    def uses_float8(self) -> bool:
        """Whether linears are exchanged for float8 ones."""
        return self.mode == "fp8_dynamic"

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of activations, and of weights where they are not quantised."""
        return torch.float32 if self.mode == "fp32" else torch.bfloat16
