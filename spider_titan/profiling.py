"""Profiler traces and memory snapshots, a file a rank, in the run directory.

Traces (Chrome's format, for ui.perfetto.dev) show what the host and the device did within a few steps. Memory
snapshots (for pytorch.org/memory_viz) show who holds the device's memory; they need CUDA.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import TracebackType

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from spider_titan.run_directory import explain_disk_errors

logger = logging.getLogger(__name__)

# Every trace is written when its cycle ends, so nothing is missed when the next one clears it.
warnings.filterwarnings("ignore", message=".*Profiler clears events at the end of each cycle")

MAX_MEMORY_EVENTS = 100_000
"""Allocations and releases that a memory snapshot goes back."""


@dataclass(frozen=True)
class ProfilingConfig:
    """The section ``[profiling]``."""

    enable_profiling: bool = False
    """Write a trace of the last profiler_active steps of every profile_freq."""
    save_traces_folder: str = "profile_traces"
    """Where traces go, in the run directory."""
    profile_freq: int = 100
    """Steps from one trace, or memory snapshot, to the next."""
    profiler_active: int = 1
    """Steps that a trace shows."""
    profiler_warmup: int = 3
    """Steps before those in which the profiler runs already and keeps nothing, as its start distorts them."""
    enable_memory_snapshot: bool = False
    """Write a snapshot of the device's memory every profile_freq steps, and where it runs out; on CUDA only."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Where memory snapshots go, in the run directory."""

    def __post_init__(self) -> None:
        if self.profiler_active < 1 or self.profiler_warmup < 0:
            raise ValueError(
                f"profiler_active = {self.profiler_active} must be at least 1, and profiler_warmup = "
                f"{self.profiler_warmup} at least 0"
            )
        if self.profile_freq < self.profiler_active + self.profiler_warmup:
            raise ValueError(
                f"profile_freq = {self.profile_freq} must be at least profiler_warmup + profiler_active = "
                f"{self.profiler_warmup} + {self.profiler_active}"
            )
        for name in ("save_traces_folder", "save_memory_snapshot_folder"):
            folder = PurePosixPath(getattr(self, name))
            if folder.is_absolute() or ".." in folder.parts or not folder.parts:
                raise ValueError(f'{name} = "{folder}" must name a folder within the run directory, such as "traces"')

    @property
    def enabled(self) -> bool:
        """Whether there is anything to do."""
        return self.enable_profiling or self.enable_memory_snapshot


class Profiler:
    """Watches the steps of a run between its beginning and end as a context manager.

    Args:
        config: The section.
        folder: The run directory.
        rank: Of this process.
        device: Where it computes.

    Raises:
        ValueError: If a memory snapshot is wanted of a device that has none.
    """

    def __init__(self, config: ProfilingConfig, folder: Path, *, rank: int, device: torch.device) -> None:
        if config.enable_memory_snapshot and device.type != "cuda":
            raise ValueError(
                f"profiling.enable_memory_snapshot = true needs a CUDA device, and this run is on {device.type}; "
                "set it to false"
            )
        self._config, self._folder, self._rank = config, folder, rank
        self._step = 0
        self._profile: profile | None = None
        if config.enable_profiling:
            wait = config.profile_freq - config.profiler_warmup - config.profiler_active
            self._profile = profile(
                activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])],
                schedule=schedule(wait=wait, warmup=config.profiler_warmup, active=config.profiler_active),
                on_trace_ready=self._save_trace,
                record_shapes=True,
            )

    def __enter__(self) -> Profiler:
        if self._config.enable_memory_snapshot:
            torch.cuda.memory._record_memory_history(max_entries=MAX_MEMORY_EVENTS)
        if self._profile is not None:
            self._profile.start()
        return self

    def step(self, step: int, paused: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Ends a training step, after which ``step`` are done in all, and writes what is due.

        Args:
            step: Steps done.
            paused: Entered while something is written.

        Raises:
            DiskError: If that cannot be written.
        """
        self._step = step
        takes_snapshot = self._config.enable_memory_snapshot and step % self._config.profile_freq == 0
        ends_trace = self._profile is not None and self._profile.current_action == ProfilerAction.RECORD_AND_SAVE
        with paused() if takes_snapshot or ends_trace else nullcontext():
            if self._profile is not None:
                self._profile.step()
            if takes_snapshot:
                self._save_memory(f"step-{step}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is not None:
            # A trace that is not complete yet is not written: it would be taken for one of whole steps.
            self._profile.on_trace_ready = None
            self._profile.stop()
        if self._config.enable_memory_snapshot:
            if isinstance(error, torch.OutOfMemoryError):
                self._save_memory(f"step-{self._step}-out-of-memory")
            torch.cuda.memory._record_memory_history(enabled=None)

    def _save_trace(self, finished: profile) -> None:
        path = self._file(self._config.save_traces_folder, f"step-{self._step}", ".json.gz")
        with explain_disk_errors(path):
            finished.export_chrome_trace(str(path))
        logger.info("profiler: trace of the steps up to %d in %s", self._step, path)

    def _save_memory(self, name: str) -> None:
        path = self._file(self._config.save_memory_snapshot_folder, name, ".pickle")
        with explain_disk_errors(path):
            torch.cuda.memory._dump_snapshot(str(path))
        logger.info("profiler: memory snapshot in %s", path)

    def _file(self, folder: str, name: str, ending: str) -> Path:
        path = self._folder / folder / name / f"rank-{self._rank}{ending}"
        with explain_disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path
