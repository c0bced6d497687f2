"""What plugins are given beside the model and its spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class PrecisionConfig:
    """The section ``[precision]``."""

    mode: Literal["fp32", "bf16"] = "fp32"
    """What blocks compute in. Master weights, gradients and their reductions are fp32 in both."""


@dataclass(frozen=True)
class PluginContext:
    """The mesh to shard over and the sections that plugins read."""

    mesh: DeviceMesh
    precision: PrecisionConfig
