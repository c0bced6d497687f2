"""What a configuration would be on its ranks, without them: built and sharded on the meta device, then described.

Nothing is allocated and no data is opened. Collectives go to a process group that moves nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spider_titan import plugins, startup
from spider_titan.activation_memory import estimate_activations
from spider_titan.console import count
from spider_titan.distributed import World, num_shards
from spider_titan.optim import GroupedAdamW, check_groups
from spider_titan.optim.shards import local
from spider_titan.plugins.fsdp import plan_units
from spider_titan.spec import ModelSpec

if TYPE_CHECKING:
    from spider_titan.config import JobConfig

logger = logging.getLogger(__name__)

MASTER_BYTES = 4
"""A rank keeps each parameter of its shard, and the gradient, in fp32."""


@dataclass(frozen=True)
class Unit:
    """One unit of ``fully_shard`` as a rank sees it.

    Args:
        fqn: Of its module; empty for the root.
        parameters: In the whole unit.
        local_parameters: In this rank's shards.
        gathered_bytes: Size of the unit's weights while they are gathered.
        reshard_after_forward: Whether they are freed until the backward, and gathered again for it.
    """

    fqn: str
    parameters: int
    local_parameters: int
    gathered_bytes: int
    reshard_after_forward: bool


@dataclass(frozen=True)
class Collectives:
    """Collectives of an optimizer step.

    Args:
        all_gathers: Of weights.
        reduce_scatters: Of gradients, over the ranks that hold a copy.
        gradient_all_reduces: Of gradients, over copies.
        scalar_all_reduces: Of counts, norms and loss terms.
    """

    all_gathers: int
    reduce_scatters: int
    gradient_all_reduces: int
    scalar_all_reduces: int


@dataclass(frozen=True)
class Memory:
    """Memory of a rank, in bytes but for the first.

    Args:
        parameters: Number of parameters in its shards.
        gathered: Gathered weights, at most.
        reduced: Buffers of the gradients of one unit that are being reduced, at most.
        activations: Of a micro-batch, at most.
        optimizer: State of the optimizer.
        offloads: Whether weights, gradients and optimizer state are in the host's memory.
    """

    parameters: int
    gathered: int
    reduced: int
    activations: int
    optimizer: int
    offloads: bool

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer state."""
        return 2 * MASTER_BYTES * self.parameters + self.optimizer

    @property
    def on_device(self) -> int:
        """All that may be on the device at once; an upper bound, as the peaks of its parts do not coincide."""
        return (0 if self.offloads else self.state) + self.gathered + self.reduced + self.activations


def run(config: JobConfig, world: World) -> None:
    """Builds, shards and describes the model of ``config`` on rank 0 of ``world``.

    Raises:
        ValueError: For what a real run would refuse before it opens its data.
    """
    spec, training = config.model_spec, config.training
    logger.info(
        "dry run: model %s, flavor %s, on %s",
        config.model.name,
        config.model.flavor,
        count(world.size, "imagined rank"),
    )
    context = plugins.PluginContext.from_config(config, world.mesh)
    model = plugins.apply_plugins(spec.build(config.model_config, device="meta"), spec, context)
    groups = spec.param_groups(model)
    check_groups(model, groups)
    optimizer = GroupedAdamW(groups, config.optimizer, config.lr_scheduler, 1, world.sum_over_shards)
    startup.log_model(config, model, optimizer, training.bytes_per_step(world.size))
    units = describe_units(model, spec, context)
    log_units(units)
    activations = estimate_activations(
        spec,
        config.model_config,
        context,
        rows=training.local_batch_size,
        seq_len=training.seq_len,
        max_boundary_rate=max(phase.boundary_capacity for phase in config.data.phases),
    )
    offloads = config.parallelism.enable_cpu_offload
    log_memory(describe_memory(units, world, activations, optimizer.state_bytes(), offloads=offloads))
    micro_batches = training.rows_per_step(world.size) // world.size // training.local_batch_size
    total = count_collectives(units, world, micro_batches)
    logger.info(
        "a step of %s: %d all-gathers, %d reduce-scatters, %d all-reduces of gradients, %d of scalars",
        count(micro_batches, "micro-batch", "es"),
        total.all_gathers,
        total.reduce_scatters,
        total.gradient_all_reduces,
        total.scalar_all_reduces,
    )
    logger.info("dry run done: nothing was trained or written")


def describe_units(model: nn.Module, spec: ModelSpec, context: plugins.PluginContext) -> list[Unit]:
    """The units of a sharded model, the root last."""
    seen: set[int] = set()
    units = []
    for unit in plan_units(model, spec, context):
        # Units do not overlap but for the root, which comes last and has what is left.
        parameters = [p for p in model.get_submodule(unit.fqn).parameters() if id(p) not in seen]
        seen.update(map(id, parameters))
        units.append(
            Unit(
                unit.fqn,
                parameters=sum(parameter.numel() for parameter in parameters),
                local_parameters=sum(local(parameter).numel() for parameter in parameters),
                gathered_bytes=sum(
                    parameter.numel() * gathered_itemsize(parameter, unit.compute_dtype.itemsize)
                    for parameter in parameters
                ),
                reshard_after_forward=unit.reshard_after_forward,
            )
        )
    return units


def gathered_itemsize(parameter: Tensor, itemsize: int) -> int:
    """Bytes a gathered element takes: 1 where the shard is a tensor that casts itself to float8 to be gathered."""
    shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return 1 if hasattr(shard, "fsdp_pre_all_gather") else itemsize


def count_collectives(units: list[Unit], world: World, micro_batches: int) -> Collectives:
    """Collectives of an optimizer step in which every parameter gets a gradient.

    A unit gathers its weights for the forward and, if it freed them, again for the backward.
    """
    shards = num_shards(world.mesh)
    copies = world.size // shards
    gathers = sum(2 if unit.reshard_after_forward else 1 for unit in units)
    return Collectives(
        all_gathers=gathers * micro_batches if shards > 1 else 0,
        reduce_scatters=len(units) * micro_batches if shards > 1 else 0,
        gradient_all_reduces=len(units) * micro_batches if copies > 1 else 0,
        scalar_all_reduces=(2 if world.size > 1 else 0) + (1 if shards > 1 else 0),
    )


def log_units(units: list[Unit]) -> None:
    """Logs a line a unit."""
    for unit in units:
        logger.info(
            "unit: %-20s %15s parameters, %15s on a rank, %9s gathered%s",
            unit.fqn or "(root)",
            f"{unit.parameters:,}",
            f"{unit.local_parameters:,}",
            gibibytes(unit.gathered_bytes),
            "" if unit.reshard_after_forward else ", kept for the backward",
        )


def describe_memory(units: list[Unit], world: World, activations: int, optimizer: int, *, offloads: bool) -> Memory:
    """What a rank holds at most.

    Args:
        units: From ``describe_units``.
        world: The ranks.
        activations: Bytes of a micro-batch, from ``estimate_activations``.
        optimizer: Bytes of its state on a rank.
        offloads: Whether weights, gradients and optimizer state are in the host's memory.
    """
    # The next unit is gathered while one computes.
    freed = sorted((unit.gathered_bytes for unit in units if unit.reshard_after_forward), reverse=True)
    gathered = sum(unit.gathered_bytes for unit in units if not unit.reshard_after_forward) + sum(freed[:2])
    # A unit's gradients are copied into one fp32 buffer and added into another. One rank has a third: its own divided.
    copies = 2 if num_shards(world.mesh) == 1 else 1
    reduced = max(4 * (copies * unit.parameters + unit.local_parameters) for unit in units)
    return Memory(
        parameters=sum(unit.local_parameters for unit in units),
        gathered=gathered,
        reduced=reduced,
        activations=activations,
        optimizer=optimizer,
        offloads=offloads,
    )


def log_memory(memory: Memory) -> None:
    """Logs what a rank keeps, and what comes on top within a step."""
    logger.info(
        "a rank: %s parameters; weights and gradients %s, optimizer %s: %s",
        f"{memory.parameters:,}",
        gibibytes(2 * MASTER_BYTES * memory.parameters),
        gibibytes(memory.optimizer),
        gibibytes(memory.state),
    )
    logger.info(
        "a rank: gathered weights at most %s, gradients being reduced %s, activations of a micro-batch %s",
        gibibytes(memory.gathered),
        gibibytes(memory.reduced),
        gibibytes(memory.activations),
    )
    logger.info(
        "a rank: at most %s on its device%s",
        gibibytes(memory.on_device),
        f", and {gibibytes(memory.state)} in the host's memory" if memory.offloads else "",
    )


def gibibytes(size: float) -> str:
    """``0.123 GiB``."""
    return f"{size / 2**30:.3f} GiB"
