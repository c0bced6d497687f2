"""The section ``[precision]``: what blocks compute in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class PrecisionConfig:
    """The section ``[precision]``."""

    mode: Literal["fp32", "bf16"] = "fp32"
    """What blocks compute in. Master weights, gradients and their reductions are fp32 in both."""

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of activations, and of weights where they are not quantised."""
        return torch.float32 if self.mode == "fp32" else torch.bfloat16
