"""FSDP2: every block is a unit of ``fully_shard``, the rest of the model is the root unit.

One rank takes the same path, on a mesh of one, so there is one way to mixed precision: parameters are fp32 shards,
gathered in the compute dtype; gradients are reduced in fp32. Units do not cast their inputs: rotary tables and halting
statistics are fp32 by design and must stay so.

A looped block is one unit around its whole loop, so its weights are gathered once a forward and once a backward however
many loops run.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from spider_titan.distributed import SHARD
from spider_titan.plugins.context import PluginContext
from spider_titan.spec import Block, ModelSpec

logger = logging.getLogger(__name__)

# Without autograd a linear layer's output is a view. The warning is about in-place operations on it: there are none.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")


def apply(model: nn.Module, spec: ModelSpec, context: PluginContext) -> nn.Module:
    """Shards ``model`` in place over the mesh."""
    compute_dtype = context.precision.compute_dtype
    blocks = spec.blocks(model)
    settings: dict[str, Any] = {
        "mesh": context.mesh,
        "offload_policy": _offload_policy(context),
        "shard_placement_fn": placement_rule(context.mesh[SHARD].size()),
    }
    for block in blocks:
        fully_shard(
            model.get_submodule(block.fqn),
            mp_policy=_policy(torch.float32 if block.compute_dtype == "float32" else compute_dtype),
            reshard_after_forward=_reshards(block, blocks, context.parallelism.fsdp_reshard_after_forward),
            **settings,
        )
    # The root's weights serve the first and the last thing of a step; gathered once, they stay.
    fully_shard(model, mp_policy=_policy(compute_dtype), reshard_after_forward=False, **settings)
    units = fsdp_units(model)
    for unit in units:
        # The loss is divided by the targets of all ranks already, so gradients are summed, not averaged.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    fp32_units = sum(block.compute_dtype == "float32" for block in blocks)
    logger.info(
        "fsdp: %d units over %s rank%s%s, compute %s (%d unit%s always fp32), masters and reductions fp32",
        len(units),
        " x ".join(str(context.mesh.size(dim)) for dim in range(context.mesh.ndim)),
        "" if context.mesh.size() == 1 else "s",
        ", offloaded to the CPU" if context.parallelism.enable_cpu_offload else "",
        str(compute_dtype).removeprefix("torch."),
        fp32_units,
        "" if fp32_units == 1 else "s",
    )
    return model


def fsdp_units(model: nn.Module) -> list[FSDPModule]:
    """The sharded units, the root first."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def placement_rule(num_shards: int) -> Any:
    """Rule for the dim that a parameter is sharded on: 0 for matrices and vectors, where uneven shards are padded.

    Stacks of matrices (experts) are sharded on the first dim that the ranks divide: with fewer experts than ranks,
    shards on dim 0 would leave ranks with nothing. Where none divides, they are uneven on dim 0.
    """

    def placement(parameter: nn.Parameter) -> Shard | None:
        if parameter.ndim < 3:
            return None
        return next((Shard(dim) for dim, size in enumerate(parameter.shape) if size % num_shards == 0), None)

    return placement


def _reshards(block: Block, blocks: Sequence[Block], policy: str) -> bool:
    # The last block's backward comes right after its forward.
    return {"always": True, "never": False}.get(policy, block is not blocks[-1])


def _offload_policy(context: PluginContext) -> OffloadPolicy:
    if context.parallelism.enable_cpu_offload:
        return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    return OffloadPolicy()


def _policy(compute_dtype: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
