"""Plugins apply parallelism and precision to whatever a spec describes, in one fixed order; they know no model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from spider_titan.plugins import activation_checkpoint, compile, fsdp, quantize
from spider_titan.plugins.context import PluginContext
from spider_titan.plugins.fsdp import materialize
from spider_titan.spec import ModelSpec


@dataclass(frozen=True)
class Plugin:
    """One transformation of a model.

    Args:
        name: Unique among plugins.
        apply: ``(model, spec, context)`` -> model. Called on the meta device, before there are weights; must neither
            rename parameters in ``state_dict`` nor add any, and logs one line that says what it did. A ValueError is
            the user's mistake and ends the run before it starts.
        after_step: ``(model, context)``; called after every optimizer step.
    """

    name: str
    apply: Callable[[nn.Module, ModelSpec, PluginContext], nn.Module]
    after_step: Callable[[nn.Module, PluginContext], None] | None = None


_PLUGINS = [
    # Linears are exchanged while they are plain modules.
    Plugin("float8", quantize.apply, quantize.after_step),
    # Within the compiled graph, so that the compiler sees what is recomputed.
    Plugin("activation_checkpoint", activation_checkpoint.apply),
    Plugin("compile", compile.apply),
    # Last, since it turns parameters into DTensors, and its hooks stay outside of compiled graphs.
    Plugin("fsdp", fsdp.apply),
]


def register_plugin(plugin: Plugin, *, before: str) -> None:
    """Adds a plugin of your own, for a module that ``[job] import`` names.

    Args:
        plugin: The plugin.
        before: Name of the plugin it is applied before; ``fsdp`` for anything that acts on unsharded modules.

    Raises:
        ValueError: If another plugin has that name, or none has the name ``before``.
    """
    names = [known.name for known in _PLUGINS]
    if plugin in _PLUGINS:
        return
    if plugin.name in names:
        raise ValueError(f"a plugin named '{plugin.name}' is registered already; give yours another name")
    if before not in names:
        raise ValueError(f"plugin '{plugin.name}' is to come before '{before}', which is none of: {', '.join(names)}")
    _PLUGINS.insert(names.index(before), plugin)


def plugin_order() -> tuple[Plugin, ...]:
    """All plugins, first to last."""
    return tuple(_PLUGINS)


def apply_plugins(model: nn.Module, spec: ModelSpec, context: PluginContext) -> nn.Module:
    """Applies every plugin to a model on the meta device."""
    for plugin in plugin_order():
        model = plugin.apply(model, spec, context)
    return model


def after_step(model: nn.Module, context: PluginContext) -> None:
    """What plugins do after every optimizer step."""
    for plugin in plugin_order():
        if plugin.after_step is not None:
            plugin.after_step(model, context)


__all__ = ["Plugin", "PluginContext", "after_step", "apply_plugins", "materialize", "plugin_order", "register_plugin"]
