"""What of a training run goes into a checkpoint, and how it comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spider_titan.checkpoint import tensors
from spider_titan.checkpoint.manager import CheckpointManager, Snapshot
from spider_titan.data.loader import merge_cursors
from spider_titan.data.rows import Cursor, Cursors
from spider_titan.distributed import World
from spider_titan.optim import GroupedAdamW


@dataclass
class Progress:
    """How far a run has come: everything that changes besides tensors and random states.

    Args:
        step: Optimizer steps done.
        bytes_seen: Valid targets of these steps, over all ranks.
        cursors: Where the data goes on; those of this rank's own shards are up to date.
        num_rows: Rows of a step over all ranks.
        interleave: Source -> its ``interleave``. It has ``num_rows`` times as many shards, which the cursors belong to.
        validated: Whether the validation that is due at ``step`` is done, if one is.
        epochs: How often all sources of a phase have been read; see ``checkpoint.keep_epoch_ends``.
        skipped_steps: Steps of these that had no effect, as a loss or gradient was not finite.
        skipped_in_row: The last ones, if they were such.
        monitor: State of the ``RecurrentMonitor``, in JSON values.
    """

    num_rows: int
    interleave: dict[str, int]
    step: int = 0
    bytes_seen: int = 0
    cursors: Cursors = field(default_factory=dict)
    validated: bool = True
    epochs: int = 0
    skipped_steps: int = 0
    skipped_in_row: int = 0
    monitor: dict[str, Any] = field(default_factory=dict)


def snapshot(progress: Progress, model: nn.Module, optimizer: GroupedAdamW, world: World) -> Snapshot:
    """The state to save."""
    optimizer_tensors = {tensors.OPTIMIZER + name: value for name, value in optimizer.state_tensors().items()}
    return Snapshot(
        step=progress.step,
        tensors={**tensors.model_tensors(model), **optimizer_tensors},
        numbers={"random": _random_states(world), "cursors": _own(progress.cursors, world)},
        shared={
            "step": progress.step,
            "bytes_seen": progress.bytes_seen,
            "num_rows": progress.num_rows,
            "interleave": progress.interleave,
            "validated": progress.validated,
            "epochs": progress.epochs,
            "skipped_steps": progress.skipped_steps,
            "skipped_in_row": progress.skipped_in_row,
            "monitor": progress.monitor,
        },
    )


def read_progress(manager: CheckpointManager, step: int, num_rows: int, interleave: dict[str, int]) -> Progress:
    """How far the run of a checkpoint had come, with the cursors of all shards.

    Raises:
        ValueError: If the documents were divided among other shards: by other rows a step, or another ``interleave`` of
            a source that was read.
    """
    state = manager.read_state(step)
    made = f"the checkpoint of step {step} in {manager.root} was made with"
    if state["num_rows"] != num_rows:
        raise ValueError(
            f"{made} {state['num_rows']} rows a step, and this run has {num_rows}; set training.global_batch_size = "
            f"{state['num_rows']}, so that each document is read once"
        )
    cursors: Cursors = {}
    for rank in state["ranks"]:
        for source, of_shards in rank["cursors"].items():
            merge_cursors(cursors, {source: {int(shard): Cursor(*cursor) for shard, cursor in of_shards.items()}})
    for source in sorted(cursors.keys() & interleave.keys()):
        if (before := state["interleave"][source]) != interleave[source]:
            raise ValueError(
                f"{made} data.sources.{source}.interleave = {before}, and this run has {interleave[source]}; set it as "
                "it was, so that each document is read once"
            )
    same_name = ("step", "bytes_seen", "validated", "epochs", "skipped_steps", "skipped_in_row", "monitor")
    interleave = state["interleave"] | interleave
    return Progress(num_rows, interleave, cursors=cursors, **{name: state[name] for name in same_name})


def restore(manager: CheckpointManager, step: int, model: nn.Module, optimizer: GroupedAdamW, world: World) -> None:
    """Fills model and optimizer, in place, and sets the random states.

    A rank that the checkpoint knows nothing of keeps the random state that its seed gave it.

    Raises:
        ValueError: If the checkpoint is of another model; lists what differs.
    """
    folder = manager.folder(step)
    prefix = tensors.OPTIMIZER
    parameters = optimizer.names()
    stored = [name.removeprefix(prefix) for name in tensors.read_metadata(folder) if name.startswith(prefix)]
    known = [name for name in stored if name.rpartition(".")[0] in parameters]
    optimizer_tensors = {prefix + name: value for name, value in optimizer.allocate_state(known).items()}
    manager.load_tensors(folder, {**tensors.model_tensors(model), **optimizer_tensors})
    states = manager.read_state(step)["ranks"]
    if world.rank < len(states):
        _set_random_states(states[world.rank]["random"], world)


def load_weights(manager: CheckpointManager, folder: Path, model: nn.Module) -> None:
    """Fills the model alone, in place.

    Raises:
        ValueError: If there is no complete checkpoint, or one of another model.
    """
    manager.require_complete(folder)
    manager.load_tensors(folder, tensors.model_tensors(model), prefix=tensors.MODEL)


def _own(cursors: Cursors, world: World) -> Cursors:
    """The cursors of the shards that a rank owns; it was given those of all, and moves these."""
    return {
        source: {shard: cursor for shard, cursor in of_shards.items() if shard % world.size == world.rank}
        for source, of_shards in cursors.items()
    }


def _random_states(world: World) -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    return {name: bytes(state.numpy().tobytes()).hex() for name, state in states.items()}


def _set_random_states(states: dict[str, Any], world: World) -> None:
    def tensor(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    torch.set_rng_state(tensor(states["cpu"]))
    if world.device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(tensor(states["cuda"]), world.device)
