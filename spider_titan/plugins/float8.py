"""float8 linears."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from spider_titan.spec import ModelSpec

if TYPE_CHECKING:
    from spider_titan.plugins.context import PluginContext


def apply(model: nn.Module, spec: ModelSpec, context: PluginContext) -> nn.Module:
    """Exchanges linears."""
    return model


def after_step(model: nn.Module, context: PluginContext) -> None:
    """Precomputes scales."""
