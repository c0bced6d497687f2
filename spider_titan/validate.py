"""Held-out bits per byte: a fixed slice, token-weighted over ranks, in the causal boundary mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from spider_titan.distributed import World
from spider_titan.spec import Batch, ModelSpec, StepContext


@dataclass(frozen=True)
class ValidationConfig:
    """The section ``[validation]``."""

    enable: bool = True
    """Whether held-out bits per byte are measured, every ``freq`` steps and at the end."""
    freq: int = 500
    """Steps from one validation to the next."""
    bytes: int = 65536
    """Size of the held-out slice, shared among the sources by the last phase's weights."""
    num_loops: tuple[int, ...] = ()
    """Numbers of loops to measure as well, as validation_bpb/T=NUMBER, each in a pass of its own over the slice."""

    def __post_init__(self) -> None:
        if self.freq < 1:
            raise ValueError(f"freq = {self.freq} must be at least 1; to switch validation off set enable = false")
        if self.bytes < 1:
            raise ValueError(f"bytes = {self.bytes} must be at least 1")
        if any(number < 1 for number in self.num_loops) or len(set(self.num_loops)) < len(self.num_loops):
            raise ValueError(f"num_loops = {list(self.num_loops)} must hold distinct numbers of at least 1")


class Validator:
    """Measures a model on the held-out slice; leaves training state and RNG alone.

    Args:
        spec: The model's spec.
        batches: Source name -> this rank's part of the slice; every rank has equally many.
        world: The ranks.
        num_loops: Numbers of loops to measure beside the trained one, for models that loop.
    """

    def __init__(
        self, spec: ModelSpec, batches: Mapping[str, Sequence[Batch]], world: World, num_loops: Sequence[int] = ()
    ) -> None:
        self._spec, self._batches, self._world, self._num_loops = spec, batches, world, num_loops

    @torch.no_grad()
    def run(
        self, model: nn.Module, *, max_boundary_rate: float, should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Returns ``validation_bpb`` and ``validation_loss`` (nats a target), and ``validation_bpb/NAME`` a source.

        With several numbers of loops it also returns ``validation_bpb/T=NUMBER`` for each.

        Args:
            model: In training mode before and after.
            max_boundary_rate: The slots a row has in the phase in force.
            should_stop: Asked before every batch, on all ranks alike; if it is true the result is None.
        """
        context = StepContext(num_targets=1, boundary_mode="threshold", max_boundary_rate=max_boundary_rate)
        device = self._world.device
        model.eval()
        try:
            # A model may draw in evaluation too, as linears in 4 bits do.
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                by_source = self._measure(model, context, should_stop)
                at_loops = {
                    number: self._measure(model, replace(context, num_loops=number), should_stop)
                    for number in self._num_loops
                }
        except _StopValidationError:
            return None
        finally:
            model.train()
        totals = self._spec.metrics(_total(by_source))
        return {
            "validation_bpb": totals["bpb"],
            "validation_loss": totals["lm_loss"],
            **{f"validation_bpb/{name}": self._spec.metrics(sums)["bpb"] for name, sums in by_source.items()},
            **{f"validation_bpb/T={n}": self._spec.metrics(_total(sums))["bpb"] for n, sums in at_loops.items()},
        }

    def _measure(
        self, model: nn.Module, context: StepContext, should_stop: Callable[[], bool]
    ) -> dict[str, dict[str, Tensor]]:
        """Source name -> sums over the slice and the ranks."""
        by_source = {}
        for name, batches in self._batches.items():
            sums: dict[str, Tensor] = {}
            for batch in batches:
                if should_stop():
                    raise _StopValidationError
                add_sums(sums, self._spec.loss(model, batch.to(self._world.device), context).sums)
            by_source[name] = self._world.sum_over_ranks(sums)
        return by_source


class _StopValidationError(Exception):
    """The run is asked to stop within a validation."""


def _total(by_source: Mapping[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    totals: dict[str, Tensor] = {}
    for sums in by_source.values():
        add_sums(totals, sums)
    return totals


def add_sums(totals: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
    """Adds ``sums`` to ``totals`` in place."""
    for name, value in sums.items():
        totals[name] = totals[name] + value if name in totals else value
