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
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from spider_titan.console import count
from spider_titan.distributed import num_shards
from spider_titan.plugins.context import PluginContext
from spider_titan.spec import ModelSpec

logger = logging.getLogger(__name__)

# Without autograd a linear layer's output is a view. The warning is about in-place operations on it: there are none.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")


@dataclass(frozen=True)
class UnitPlan:
    """How one unit is sharded.

    Args:
        fqn: Of its module; empty for the root.
        compute_dtype: Of its gathered weights.
        reshard_after_forward: Whether gathered weights are freed until the backward, and gathered again for it.
    """

    fqn: str
    compute_dtype: torch.dtype
    reshard_after_forward: bool


def plan_units(model: nn.Module, spec: ModelSpec, context: PluginContext) -> list[UnitPlan]:
    """The units of a model, the root last."""
    dtype, blocks = context.precision.compute_dtype, spec.blocks(model)
    # The last block's backward comes right after its forward.
    reshards = {
        "default": lambda block: block is not blocks[-1],
        "always": lambda block: True,
        "never": lambda block: False,
    }[context.parallelism.fsdp_reshard_after_forward]
    units = [
        UnitPlan(block.fqn, torch.float32 if block.compute_dtype == "float32" else dtype, reshards(block))
        for block in blocks
    ]
    # The root's weights serve the first and the last thing of a forward.
    return [*units, UnitPlan("", dtype, reshard_after_forward=False)]


def apply(model: nn.Module, spec: ModelSpec, context: PluginContext) -> nn.Module:
    """Shards ``model`` in place over the mesh."""
    units = plan_units(model, spec, context)
    for unit in units:
        module = fully_shard(
            model.get_submodule(unit.fqn),
            mesh=context.mesh,
            reshard_after_forward=unit.reshard_after_forward,
            shard_placement_fn=placement_rule(num_shards(context.mesh)),
            mp_policy=MixedPrecisionPolicy(
                param_dtype=unit.compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
            offload_policy=_offload_policy(context),
        )
        # The loss is divided by the targets of all ranks already, so gradients are summed, not averaged.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    fp32_units = sum(block.compute_dtype == "float32" for block in spec.blocks(model))
    logger.info(
        "fsdp: %s over %s rank%s%s, compute %s (%s always fp32), masters and reductions fp32",
        count(len(units), "unit"),
        " x ".join(str(context.mesh.size(dim)) for dim in range(context.mesh.ndim)),
        "" if context.mesh.size() == 1 else "s",
        ", offloaded to the CPU" if context.parallelism.enable_cpu_offload else "",
        context.precision.mode,
        count(fp32_units, "unit"),
    )
    return model


def materialize(model: nn.Module, context: PluginContext, device: torch.device) -> None:
    """Gives a sharded model on the meta device memory, without values: on ``device``, or where it is offloaded to."""
    offloaded = context.parallelism.enable_cpu_offload
    model.to_empty(device="cpu" if offloaded else device)
    if offloaded:
        # Parameters alone are offloaded; buffers are used where they are.
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))


def placement_rule(shards: int) -> Any:
    """Rule for the dim that a parameter is sharded on: 0 for matrices and vectors, where uneven shards are padded.

    Stacks of matrices (experts) are sharded on the first dim that the ranks divide: with fewer experts than ranks,
    shards on dim 0 would leave ranks with nothing. Where none divides, they are uneven on dim 0.
    """

    def placement(parameter: nn.Parameter) -> Shard | None:
        if parameter.ndim < 3:
            return None
        return next((Shard(dim) for dim, size in enumerate(parameter.shape) if size % shards == 0), None)

    return placement


def _offload_policy(context: PluginContext) -> OffloadPolicy:
    if context.parallelism.enable_cpu_offload:
        return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    return OffloadPolicy()
