"""Activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from spider_titan.spec import ModelSpec

if TYPE_CHECKING:
    from spider_titan.plugins.context import PluginContext


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """The section ``[activation_checkpoint]``."""


def apply(model: nn.Module, spec: ModelSpec, context: PluginContext) -> nn.Module:
    """Wraps the applications of every block."""
    return model
