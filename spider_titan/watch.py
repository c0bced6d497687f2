"""Loss and gradient norm of every step, over all ranks: a step in which one is not finite does not count.

The step is skipped on the device, by a flag that travels with the sums that ranks add up anyway. What the host must
know, for counting and for warnings, is copied beside the work and read when it has surely arrived: two steps later on
an accelerator, or when something waits for the device in any case.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spider_titan.checkpoint.training import Progress
from spider_titan.distributed import World

logger = logging.getLogger(__name__)

LAG = 2
"""Steps that an accelerator may be behind the host before the host waits for it."""

_KEY = "step_watch"


class NonFiniteError(RuntimeError):
    """Too many steps in a row had a loss or gradient that is not finite."""


@dataclass(frozen=True)
class StepReport:
    """What the host learns of a step.

    Args:
        step: Counted from 0.
        loss: The total that is minimised, over all ranks and micro-batches.
        bad_losses: Ranks whose loss is not finite.
        bad_norms: Gradient norms that are not finite, by the names that ``GroupedAdamW.clip`` gives them.
    """

    step: int
    loss: float
    bad_losses: int
    bad_norms: tuple[str, ...]

    @property
    def skipped(self) -> bool:
        """Whether the step was without effect."""
        return bool(self.bad_losses or self.bad_norms)


class StepWatch:
    """Decides, for all ranks alike, whether a step counts.

    Args:
        world: The ranks.
        lag: Steps after which a report is read; default: 0 on the CPU, where nothing is to be waited for, else ``LAG``.
    """

    def __init__(self, world: World, lag: int | None = None) -> None:
        self._world = world
        self._lag = lag if lag is not None else (0 if world.device.type == "cpu" else LAG)
        self._pending: deque[tuple[int, Sequence[str], Tensor, torch.cuda.Event | None]] = deque()

    @torch.no_grad()
    def add_up(
        self, step: int, loss: Tensor, totals: Mapping[str, Tensor], norms: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Adds a step's sums over the ranks, and with them says whether it must be skipped.

        Args:
            step: Counted from 0.
            loss: This rank's part of the loss, scalar.
            totals: This rank's sums.
            norms: From ``GroupedAdamW.clip``.

        Returns:
            The totals of all ranks, and a bool scalar on the device: true if the step must not count.
        """
        # The gradients of offloaded parameters are not where the loss is.
        measured = torch.stack([loss, *(norm.to(loss.device) for norm in norms.values())]).double()
        mine = torch.cat((measured[:1], (~measured.isfinite()).double()))
        sums = self._world.sum_over_ranks({**totals, _KEY: mine})
        report = sums.pop(_KEY)
        host, event = report.to("cpu", non_blocking=True), None
        if report.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        self._pending.append((step, tuple(norms), host, event))
        return sums, (report[1:] > 0).any()

    def review(self, progress: Progress, max_in_row: int, *, wait: bool) -> list[StepReport]:
        """Counts the skipped steps among those that have been reported, and warns of each.

        Args:
            progress: Its counts are moved.
            max_in_row: ``training.max_skipped_steps``.
            wait: Read all reports, also those that the device may still be busy with.

        Returns:
            The reports, oldest first; each is returned once.

        Raises:
            NonFiniteError: At ``max_in_row`` skipped steps in a row.
        """
        reports = []
        while len(self._pending) > (0 if wait else self._lag):
            report = _read(*self._pending.popleft())
            reports.append(report)
            if not report.skipped:
                progress.skipped_in_row = 0
                continue
            progress.skipped_steps += 1
            progress.skipped_in_row += 1
            reason = self._describe(report)
            if self._world.is_reporter:
                logger.warning(
                    "step %d is skipped on all ranks: %s; %d skipped in a row, %d in all",
                    report.step + 1,
                    reason,
                    progress.skipped_in_row,
                    progress.skipped_steps,
                )
            if progress.skipped_in_row >= max_in_row:
                raise NonFiniteError(
                    f"step {report.step + 1}: {reason}, and so for {progress.skipped_in_row} steps in a row "
                    "(training.max_skipped_steps); lower optimizer.lr, or look into the data of these steps; "
                    "checkpoints are as they were"
                )
        return reports

    def _describe(self, report: StepReport) -> str:
        if report.bad_losses:
            # Its gradients are a consequence.
            return f"the loss is not finite on {report.bad_losses} of {self._world.size} ranks"
        return f"not finite, though the loss is: {', '.join(report.bad_norms)}"


@contextmanager
def unless(skip: Tensor, model: nn.Module) -> Iterator[None]:
    """Undoes what the block does to the model's buffers if ``skip``, a bool scalar on their device, is true."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(torch.where(skip, value, buffer))


def _read(step: int, names: Sequence[str], report: Tensor, event: torch.cuda.Event | None) -> StepReport:
    if event is not None:
        event.synchronize()
    loss, bad_losses, *bad_norms = report.tolist()
    bad = tuple(name for name, count in zip(names, bad_norms, strict=True) if count)
    return StepReport(step, math.nan if bad_losses else loss, int(bad_losses), bad)
