"""Plugins apply parallelism and precision to whatever a spec describes, in one fixed order; they know no model."""

from __future__ import annotations

import logging

from torch import nn

from spider_titan.plugins import fsdp
from spider_titan.plugins.context import PluginContext
from spider_titan.spec import ModelSpec

logger = logging.getLogger(__name__)

ORDER = (fsdp,)
"""Applied first to last: sharding comes last, since it turns parameters into DTensors."""


def apply_plugins(model: nn.Module, spec: ModelSpec, context: PluginContext) -> nn.Module:
    """Applies every plugin to a model on the meta device; each logs one line."""
    for plugin in ORDER:
        model = plugin.apply(model, spec, context)
    return model


__all__ = ["PluginContext", "apply_plugins"]
