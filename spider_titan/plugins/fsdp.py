"""FSDP2: every block is a unit of ``fully_shard``, the rest of the model is the root unit.

One rank takes the same path, on a mesh of one, so there is one way to mixed precision: parameters are fp32 shards,
gathered in the compute dtype; gradients are reduced in fp32. Units do not cast their inputs: rotary tables and halting
statistics are fp32 by design and must stay so.
"""

from __future__ import annotations

import logging
import warnings

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from spider_titan.plugins.context import PluginContext
from spider_titan.spec import ModelSpec

logger = logging.getLogger(__name__)

# Without autograd a linear layer's output is a view. The warning is about in-place operations on it: there are none.
warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def apply(model: nn.Module, spec: ModelSpec, context: PluginContext) -> nn.Module:
    """Shards ``model`` in place over the mesh."""
    compute_dtype = COMPUTE_DTYPES[context.precision.mode]
    blocks = spec.blocks(model)
    for block in blocks:
        dtype = torch.float32 if block.compute_dtype == "float32" else compute_dtype
        fully_shard(model.get_submodule(block.fqn), mesh=context.mesh, mp_policy=_policy(dtype))
    fully_shard(model, mesh=context.mesh, mp_policy=_policy(compute_dtype))
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        # The loss is divided by the targets of all ranks already, so gradients are summed, not averaged.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    fp32_units = sum(block.compute_dtype == "float32" for block in blocks)
    logger.info(
        "fsdp: %d units over %d rank%s, compute %s (%d unit%s always fp32), masters and reductions fp32",
        len(units),
        context.mesh.size(),
        "" if context.mesh.size() == 1 else "s",
        context.precision.mode,
        fp32_units,
        "" if fp32_units == 1 else "s",
    )
    return model


def _policy(compute_dtype: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
