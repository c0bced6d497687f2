"""Activation checkpointing: activations are dropped after the forward and computed again for the backward.

Every application of a block is wrapped by itself. A looped block's parts are wrapped one by one, so each loop is
recomputed when the backward reaches it and no two loops' activations are there at once.

Recomputation sees the random numbers of the forward. Losses and statistics are made outside of blocks from what the
first forward returned, so nothing is counted twice.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from spider_titan.models.common import grouped
from spider_titan.spec import ModelSpec

if TYPE_CHECKING:
    from spider_titan.plugins.compile import CompileConfig
    from spider_titan.plugins.context import PluginContext

logger = logging.getLogger(__name__)

aten = torch.ops.aten
SAVED_OPERATORS: list[Any] = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_mm.default,
    aten._grouped_mm.default,
    aten._scaled_grouped_mm.default,
    grouped.OPERATOR,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.higher_order.flex_attention,
    # Not for its cost: an expert chosen on a tie must not be another one when it is chosen again.
    aten.topk.default,
]
"""What ``selective`` keeps: matrix products and attention. They are nearly all of the arithmetic, and their results are
less than half of the activations. Norms, gates, rotations, casts and gathers are the rest: much memory, little work."""


@dataclass(frozen=True)
class ActivationCheckpointConfig:
    """The section ``[activation_checkpoint]``."""

    mode: Literal["none", "selective", "full", "memory_budget"] = "none"
    """What is recomputed in the backward. none: nothing. selective: all but matrix products and attention. full: every
    application of a block, from its input. memory_budget: what the compiler chooses to stay within memory_budget."""
    memory_budget: float | None = None
    """For mode = memory_budget: kept activations of a compiled block as a share, from 0 (as full) to 1 (as none)."""

    def __post_init__(self) -> None:
        if self.mode != "memory_budget" and self.memory_budget is not None:
            raise ValueError(
                f"memory_budget = {self.memory_budget} is for mode = memory_budget, not {self.mode}; "
                "remove it or change mode"
            )
        if self.mode == "memory_budget" and (self.memory_budget is None or not 0.0 <= self.memory_budget <= 1.0):
            raise ValueError(f"memory_budget = {self.memory_budget} must be given, from 0 to 1, in this mode")


def check(config: ActivationCheckpointConfig, compiling: CompileConfig) -> None:
    """Compares the section with ``[compile]``.

    Raises:
        ValueError: If there is a memory budget and no compiler to keep it.
    """
    if config.mode == "memory_budget" and not compiling.enable:
        raise ValueError(
            "activation_checkpoint.mode = memory_budget needs compile.enable = true, as the compiler chooses what is "
            "recomputed; enable it, or use selective or full"
        )


def apply(model: nn.Module, spec: ModelSpec, context: PluginContext) -> nn.Module:
    """Wraps the applications of every block in place."""
    config = context.activation_checkpoint
    # The budget is the process's, so one of an earlier model must not stay.
    torch._functorch.config.activation_memory_budget = 1.0 if config.memory_budget is None else config.memory_budget
    if config.mode == "none":
        return model
    names = [fqn for block in spec.blocks(model) for fqn in block.applications]
    if not names:
        logger.warning(
            "activation checkpointing: nothing to do for mode = %s, as model '%s' names no blocks",
            config.mode,
            spec.name,
        )
        return model
    if config.mode == "memory_budget":
        logger.info("activation checkpointing: the compiler keeps %g of each block's activations", config.memory_budget)
        return model
    settings: dict[str, Any] = {"checkpoint_impl": CheckpointImpl.NO_REENTRANT, "preserve_rng_state": True}
    if config.mode == "selective":
        settings["context_fn"] = partial(create_selective_checkpoint_contexts, SAVED_OPERATORS)
    for fqn in names:
        model.set_submodule(fqn, checkpoint_wrapper(model.get_submodule(fqn), **settings))
    kept = "all but matrix products and attention is" if config.mode == "selective" else "everything is"
    logger.info("activation checkpointing: %s, %s recomputed in %d modules", config.mode, kept, len(names))
    return model
