"""The section ``[precision]``: what blocks compute in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Mode = Literal["fp32", "bf16", "fp8_dynamic", "mxfp8", "nvfp4"]
QuantisedMode = Literal["fp8_dynamic", "mxfp8", "nvfp4"]


@dataclass(frozen=True)
class PrecisionConfig:
    """The section ``[precision]``."""

    mode: Literal["auto", "fp32", "bf16", "fp8_dynamic", "mxfp8", "nvfp4"] = "fp32"
    """What blocks compute in. fp8_dynamic, mxfp8 and nvfp4: bf16, and their linears in 8 or 4 bits; auto: the best that
    the device supports. Master weights, optimizer state and the reduction of gradients are fp32 in all."""
    strict: bool = False
    """Stop if the device cannot run mode. Without, the next that it can run is taken, of nvfp4, mxfp8, fp8_dynamic and
    bf16, with a warning."""
    fp8_recipe: Literal["rowwise", "tensorwise"] = "rowwise"
    """Scales of fp8_dynamic: one for each row and column of a product (more accurate), or one a tensor (faster)."""
    fp8_all_gather: bool = False
    """Gather the weights of fp8_dynamic's linears as float8, half of bf16's bytes; needs fp8_recipe = "tensorwise"."""
    emulate: bool = False
    """Round as fp8_dynamic or mxfp8 does, but multiply in high precision: the numerics without the speed, on any
    device."""
    skip: tuple[str, ...] = ()
    """Linears not to quantise: patterns over full names, such as "coda.1.*" or "*.attention.kv_down"."""

    def __post_init__(self) -> None:
        if self.fp8_all_gather and self.fp8_recipe != "tensorwise":
            raise ValueError(
                f'fp8_all_gather = true does not go with fp8_recipe = "{self.fp8_recipe}": a gathered weight has one '
                'scale; set fp8_recipe = "tensorwise", or fp8_all_gather = false'
            )
        if self.mode == "auto":
            for name in ("strict", "emulate"):
                if getattr(self, name):
                    raise ValueError(
                        f'{name} = true does not go with mode = "auto", which takes what there is; name a mode'
                    )

    @property
    def is_quantised(self) -> bool:
        """Whether linears are exchanged for ones that multiply in 8 or 4 bits."""
        return self.mode in ("fp8_dynamic", "mxfp8", "nvfp4")

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of activations, and of weights where they are not quantised."""
        assert self.mode != "auto", "the mode is chosen when the plugins' context is made"
        return torch.float32 if self.mode == "fp32" else torch.bfloat16
