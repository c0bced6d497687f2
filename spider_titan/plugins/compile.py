"""torch.compile a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from spider_titan.spec import ModelSpec

if TYPE_CHECKING:
    from spider_titan.plugins.context import PluginContext


@dataclass(frozen=True)
class CompileConfig:
    """The section ``[compile]``."""


def apply(model: nn.Module, spec: ModelSpec, context: PluginContext) -> nn.Module:
    """Compiles the applications of every block."""
    return model
