"""Held-out bits per byte: a fixed slice, token-weighted over ranks, in the causal boundary mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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

    def __post_init__(self) -> None:
        if self.freq < 1:
            raise ValueError(f"freq = {self.freq} must be at least 1; to switch validation off set enable = false")
        if self.bytes < 1:
            raise ValueError(f"bytes = {self.bytes} must be at least 1")


class Validator:
    """Measures a model on the held-out slice; leaves training state and RNG alone.

    Args:
        spec: The model's spec.
        batches: Source name -> this rank's part of the slice; every rank has equally many.
        world: The ranks.
    """

    def __init__(self, spec: ModelSpec, batches: Mapping[str, Sequence[Batch]], world: World) -> None:
        self._spec, self._batches, self._world = spec, batches, world

    @torch.no_grad()
    def run(
        self, model: nn.Module, *, max_boundary_rate: float, should_stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float] | None:
        """Returns ``validation_bpb`` and ``validation_loss`` (nats a target), and ``validation_bpb/NAME`` a source.

        Args:
            model: In training mode before and after.
            max_boundary_rate: The slots a row has in the phase in force.
            should_stop: Asked before every batch, on all ranks alike; if it is true the result is None.
        """
        context = StepContext(num_targets=1, boundary_mode="threshold", max_boundary_rate=max_boundary_rate)
        totals: dict[str, Tensor] = {}
        by_source: dict[str, float] = {}
        model.eval()
        for name, batches in self._batches.items():
            sums: dict[str, Tensor] = {}
            for batch in batches:
                if should_stop():
                    model.train()
                    return None
                add_sums(sums, self._spec.loss(model, batch.to(self._world.device), context).sums)
            sums = self._world.sum_over_ranks(sums)
            by_source[f"validation_bpb/{name}"] = self._spec.metrics(sums)["bpb"]
            add_sums(totals, sums)
        model.train()
        metrics = self._spec.metrics(totals)
        return {"validation_bpb": metrics["bpb"], "validation_loss": metrics["lm_loss"], **by_source}


def add_sums(totals: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
    """Adds ``sums`` to ``totals`` in place."""
    for name, value in sums.items():
        totals[name] = totals[name] + value if name in totals else value
