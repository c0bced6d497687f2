"""Progress -> phase: which data mixture and which boundary mode are in force.

Progress is the share of the byte budget that has been consumed at the start of a step. Every step consumes
``global_batch_size * seq_len`` positions, so progress, and with it every switch, is a function of the step alone:
equal on all ranks and in the data loader.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

DEFAULT_MAX_BOUNDARY_RATE = {"fixed": 0.34, "adaptive": 0.45}
"""Slots a row as a share of its length. An empty slot is wasted work, a missing one drops a boundary."""


@dataclass(frozen=True)
class PhaseConfig:
    """One entry of ``[[data.phases]]``."""

    until: float = 1.0
    """Progress (share of the byte budget, 0..1] at which the phase ends."""
    weights: dict[str, float] = field(default_factory=dict)
    """Source name -> share of the phase's bytes; the shares are normalised."""
    boundary: Literal["fixed", "adaptive"] = "adaptive"
    """fixed: every row is held to the target rate. adaptive: each row's rate is free around it."""
    selection: Literal["topk", "threshold"] = "topk"
    """How a fixed phase selects in training: topk looks at the whole row, threshold is causal. adaptive: threshold."""
    max_boundary_rate: float | None = None
    """Boundaries a row has slots for, as a share of its length. Unset: 0.34 in fixed, 0.45 in adaptive phases."""

    def __post_init__(self) -> None:
        if not 0.0 < self.until <= 1.0:
            raise ValueError(f"until = {self.until} is not in (0, 1]")
        if self.max_boundary_rate is not None and not 0.0 < self.max_boundary_rate <= 1.0:
            raise ValueError(f"max_boundary_rate = {self.max_boundary_rate} is not in (0, 1]")
        if any(weight < 0 for weight in self.weights.values()):
            raise ValueError(f"weights = {self.weights}: a weight is negative")

    @property
    def boundary_mode(self) -> Literal["topk", "threshold"]:
        """The selection that training uses in this phase."""
        return self.selection if self.boundary == "fixed" else "threshold"

    @property
    def boundary_capacity(self) -> float:
        """``max_boundary_rate``, or its default for the phase."""
        if self.max_boundary_rate is not None:
            return self.max_boundary_rate
        return DEFAULT_MAX_BOUNDARY_RATE[self.boundary]


class Curriculum:
    """Finds the phase of a step.

    Args:
        phases: In order of ``until``; the last ends at 1.0.
        byte_budget: Positions of the whole run.
        bytes_per_step: Positions one optimizer step consumes over all ranks.

    Raises:
        ValueError: If there is no phase, the ends do not increase, or the last is not 1.0.
    """

    def __init__(self, phases: Sequence[PhaseConfig], *, byte_budget: int, bytes_per_step: int) -> None:
        check_phases(phases)
        self.phases = tuple(phases)
        self.byte_budget = byte_budget
        self.bytes_per_step = bytes_per_step

    def index_at(self, step: int) -> int:
        """The phase number of ``step`` (both counted from 0)."""
        progress = step * self.bytes_per_step / self.byte_budget
        for index, phase in enumerate(self.phases):
            if progress < phase.until:
                return index
        return len(self.phases) - 1

    def at(self, step: int) -> PhaseConfig:
        """The phase in force at ``step``, counted from 0."""
        return self.phases[self.index_at(step)]


def check_phases(phases: Sequence[PhaseConfig]) -> None:
    """Raises ValueError unless the ends increase and the last is 1.0."""
    ends = [phase.until for phase in phases]
    if not ends:
        raise ValueError("data.phases is empty; give at least one [[data.phases]]")
    if any(a >= b for a, b in pairwise(ends)):
        raise ValueError(f"data.phases: 'until' must increase from phase to phase, got {ends}")
    if ends[-1] != 1.0:
        raise ValueError(f"data.phases: the last phase must have until = 1.0, got {ends[-1]}")
