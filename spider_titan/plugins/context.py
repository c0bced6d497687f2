"""What plugins are given beside the model and its spec."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.distributed.device_mesh import DeviceMesh

from spider_titan.distributed import ParallelismConfig
from spider_titan.plugins.activation_checkpoint import ActivationCheckpointConfig
from spider_titan.plugins.capability import resolve
from spider_titan.plugins.compile import CompileConfig
from spider_titan.plugins.precision import PrecisionConfig

if TYPE_CHECKING:
    from spider_titan.config import JobConfig


@dataclass(frozen=True)
class PluginContext:
    """The mesh to shard over and the sections that plugins read."""

    mesh: DeviceMesh
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    activation_checkpoint: ActivationCheckpointConfig = field(default_factory=ActivationCheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)

    @classmethod
    def from_config(cls, config: JobConfig, mesh: DeviceMesh) -> PluginContext:
        """The sections of a run, with the precision that its devices can compute in.

        Raises:
            ValueError: If that is not the one named, and ``precision.strict`` is set.
        """
        return cls(
            mesh, resolve(config.precision, mesh), config.activation_checkpoint, config.compile, config.parallelism
        )
