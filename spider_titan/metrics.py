"""Numbers of a run: one line on the console, one JSON object in ``metrics.jsonl`` and the TensorBoard curves.

Only the rank that reports has a ``MetricsLogger``. Values are plain numbers and strings: reducing tensors over
micro-batches and ranks is the trainer's work.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from spider_titan.run_directory import explain_disk_errors

if TYPE_CHECKING:
    import numpy as np
    from torch.utils.tensorboard import SummaryWriter

    from spider_titan.wandb_log import WeightsAndBiases

logger = logging.getLogger(__name__)

Value = float | int | str

REQUIRED_TRAIN_KEYS = ("loss", "lm_loss", "bpb", "grad_norm", "lr", "bytes_seen", "bytes_per_second")
OPTIONAL_TRAIN_KEYS = ("boundary_rate", "phase")
"""Null in metrics.jsonl where a model or run has no such thing, so that every training line has the same first keys."""

TENSORBOARD_TAGS = {
    "loss": "loss/total",
    "lm_loss": "loss/lm",
    "bpb": "loss/bpb",
    "grad_norm": "optim/grad_norm",
    "lr": "optim/lr",
    "skipped_steps": "optim/skipped_steps",
    "boundary_rate": "boundary/rate",
    "phase": "curriculum/phase",
    "bytes_seen": "throughput/bytes_seen",
    "bytes_per_second": "throughput/bytes_per_second",
    "loader_wait": "throughput/loader_wait",
    "epochs": "data/epochs",
    "eta_seconds": "throughput/eta_seconds",
    "mfu": "throughput/mfu",
    "memory_gib": "memory/peak_gib",
    "validation_loss": "validation/loss",
    "validation_bpb": "validation/bpb",
}
"""Metric name -> tag. ``lr/engram`` takes the tag of ``lr`` and keeps its ending; unknown names go under ``model/``."""


@dataclass(frozen=True)
class MetricsConfig:
    """The section ``[metrics]``."""

    log_freq: int = 10
    """Steps from one log line to the next. A line has the numbers of its own step, and the rate since the last line."""
    enable_tensorboard: bool = True
    """Write TensorBoard curves to tb/ in the run directory; metrics.jsonl is always written."""
    enable_wandb: bool = False
    """Send the numbers to Weights & Biases too; needs the package wandb."""

    def __post_init__(self) -> None:
        if self.log_freq < 1:
            raise ValueError(f"metrics.log_freq = {self.log_freq}: give at least 1")


class MetricsLogger:
    """Writes what is logged to the console, to ``metrics_file`` and, if wanted, to TensorBoard.

    Args:
        metrics_file: JSON lines are appended here; each is on disk when the call returns.
        total_steps: Steps of the whole run, shown beside the step.
        tensorboard_folder: None: no TensorBoard.
        first_step: Steps that are done already. What an earlier leg of the run has logged beyond them is dropped,
            since those steps come again.
        wandb: None: no Weights & Biases.

    Raises:
        DiskError: From every method, if something cannot be written.
    """

    def __init__(
        self,
        metrics_file: Path,
        *,
        total_steps: int,
        tensorboard_folder: Path | None = None,
        first_step: int = 0,
        wandb: WeightsAndBiases | None = None,
    ) -> None:
        self._metrics_file = metrics_file
        self._total_steps = total_steps
        self._wandb = wandb
        drop_lines_beyond(metrics_file, first_step)
        self._tensorboard = TensorBoard(tensorboard_folder, first_step) if tensorboard_folder is not None else None

    def log_train(self, step: int, values: Mapping[str, Value]) -> None:
        """Logs a training step.

        Args:
            step: Optimizer steps done, so the first one is 1.
            values: Has ``REQUIRED_TRAIN_KEYS``; ``format_train_line`` tells their units and which others are shown.
        """
        missing = [key for key in REQUIRED_TRAIN_KEYS if key not in values]
        assert not missing, f"the trainer did not compute {missing}"
        optional = {key: values.get(key) for key in OPTIONAL_TRAIN_KEYS}
        self._write(step, {**{key: values[key] for key in REQUIRED_TRAIN_KEYS}, **optional, **values})
        logger.info("%s", format_train_line(step, self._total_steps, values))

    def log_validation(self, step: int, values: Mapping[str, Value]) -> None:
        """Logs a validation after ``step`` optimizer steps.

        Args:
            step: Optimizer steps done.
            values: Has ``validation_bpb``; ``validation_bpb/NAME`` is the part of the source NAME.
        """
        assert "validation_bpb" in values, "the validation did not compute validation_bpb"
        self._write(step, values)
        logger.info("%s", format_validation_line(step, self._total_steps, values))

    def log_sample(self, step: int, text: str | None, image: np.ndarray | None) -> None:
        """Shows a text (Markdown) and a grey picture, uint8 [height, width], in TensorBoard, if that is written."""
        if self._tensorboard is not None:
            self._tensorboard.add_sample(step, text, image)

    def close(self) -> None:
        """Brings the last curves to disk; nothing may be logged afterwards."""
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.close()

    def _write(self, step: int, values: Mapping[str, Value | None]) -> None:
        line = json.dumps({"step": step, **{key: _json_value(value) for key, value in values.items()}}, allow_nan=False)
        with explain_disk_errors(self._metrics_file), self._metrics_file.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        if self._tensorboard is not None:
            self._tensorboard.add(step, values)
        if self._wandb is not None:
            self._wandb.add(step, values)


def drop_lines_beyond(metrics_file: Path, step: int) -> None:
    """Keeps the whole lines up to ``step``; a process that was killed while it wrote leaves half a line."""
    with explain_disk_errors(metrics_file):
        if not metrics_file.is_file():
            return
        text = metrics_file.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        if len(kept) != len(lines):
            temporary = metrics_file.with_name(f".{metrics_file.name}.new")
            temporary.write_text("".join(kept), encoding="utf-8")
            temporary.replace(metrics_file)


class TensorBoard:
    """Curves of the numbers, and texts where a string value changes.

    Args:
        folder: Where the event files go.
        first_step: Points of earlier event files beyond it are not shown any more.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        # TensorBoard takes a second to import, which a run without it need not spend.
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        self._last_texts: dict[str, str] = {}
        with explain_disk_errors(folder):
            purge_step = first_step + 1 if folder.is_dir() else None
            self._writer: SummaryWriter = SummaryWriter(str(folder), flush_secs=30, purge_step=purge_step)

    def add(self, step: int, values: Mapping[str, Value | None]) -> None:
        """Adds a point to the curve of every number, and a text for every string that is not the last one."""
        with explain_disk_errors(self._folder):
            for name, value in values.items():
                tag = tensorboard_tag(name)
                if isinstance(value, str):
                    if self._last_texts.get(name) != value:
                        self._writer.add_text(tag, value, step)
                        self._last_texts[name] = value
                elif value is not None:
                    self._writer.add_scalar(tag, value, step)

    def add_sample(self, step: int, text: str | None, image: np.ndarray | None) -> None:
        """Adds a text of segments, and a picture of the experts' load."""
        with explain_disk_errors(self._folder):
            if text is not None:
                self._writer.add_text("samples/segments", text, step)
            if image is not None:
                self._writer.add_image("samples/expert_load", image, step, dataformats="HW")

    def close(self) -> None:
        """Writes what is still queued."""
        with explain_disk_errors(self._folder):
            self._writer.close()


@dataclass(frozen=True)
class Lap:
    """What a ``RateMeter`` measured over one interval; NaN where it has counted no whole step.

    Args:
        bytes_per_second: Counted bytes over the interval's seconds.
        flops_per_second: Counted FLOPs over them.
        seconds_per_step: Mean duration of its steps.
    """

    bytes_per_second: float
    flops_per_second: float
    seconds_per_step: float


class RateMeter:
    """Measures the rate from one lap to the next.

    The time before the end of the first step is never counted, and neither are that step's bytes: it contains lazy
    allocation, compilation and the data loader's start. Time inside ``paused`` is left out too.

    Args:
        clock: Returns seconds.
        wait_for_device: Returns when the device has done what the counted steps gave it to do.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, wait_for_device: Callable[[], None] = lambda: None
    ) -> None:
        self._clock, self._wait_for_device = clock, wait_for_device
        self._start: float | None = None
        self._paused = 0.0
        self._bytes = 0
        self._flops = 0.0
        self._steps = 0

    def count(self, num_bytes: int, flops: float = 0.0) -> None:
        """Ends a step that consumed ``num_bytes`` bytes and took ``flops`` FLOPs, both over all ranks."""
        if self._start is None:
            self._restart()
            return
        self._bytes += num_bytes
        self._flops += flops
        self._steps += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves the time of the block out, such as a validation or a save. Not to be nested."""
        # What is still queued belongs to the steps before the pause.
        self._wait_for_device()
        begin = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - begin

    def lap(self) -> Lap:
        """Returns the rate since the last lap and starts the next, unless no step was counted yet."""
        if self._start is None or self._steps == 0:
            return Lap(bytes_per_second=math.nan, flops_per_second=math.nan, seconds_per_step=math.nan)
        seconds = self._clock() - self._start - self._paused
        lap = Lap(self._bytes / seconds, self._flops / seconds, seconds / self._steps)
        self._restart()
        return lap

    def _restart(self) -> None:
        self._start = self._clock()
        self._paused = 0.0
        self._bytes = 0
        self._flops = 0.0
        self._steps = 0


def format_train_line(step: int, total_steps: int, values: Mapping[str, Value]) -> str:
    """The console line of a training step.

    Args:
        step: Optimizer steps done.
        total_steps: Steps of the whole run.
        values: Shown if present, in this order: ``loss``; ``bpb``; ``grad_norm``; ``lr``; ``boundary_rate`` (share of
            the bytes that end a segment); ``phase`` (text); ``bytes_per_second``; ``mfu`` (share of the peak, 0..1);
            ``memory_gib``; ``eta_seconds``. A rate or time that is not known yet (NaN) is left out.
    """
    shown = (show(values[key]) for key, show in _TRAIN_COLUMNS.items() if key in values)
    return "  ".join((_format_step(step, total_steps), *filter(None, shown)))


def format_validation_line(step: int, total_steps: int, values: Mapping[str, Value]) -> str:
    """The console line of a validation: bits a byte in all, then those of each source."""
    parts = [_format_step(step, total_steps), f"validation bpb {_format_fixed(values['validation_bpb'], 4)}"]
    for name, value in values.items():
        metric, _, source = name.partition("/")
        if metric == "validation_bpb" and source:
            parts.append(f"{source} {_format_fixed(value, 4)}")
    return "  ".join(parts)


def tensorboard_tag(name: str) -> str:
    """The tag of a metric; see ``TENSORBOARD_TAGS``."""
    metric, slash, part = name.partition("/")
    if metric in TENSORBOARD_TAGS:
        return f"{TENSORBOARD_TAGS[metric]}{slash}{part}"
    return f"model/{name}"


def format_duration(seconds: float) -> str:
    """``1:52``, ``3:01:52`` or ``2d 03:01:52``."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}:{seconds_left:02}"
    if hours:
        return f"{hours}:{minutes:02}:{seconds_left:02}"
    return f"{minutes}:{seconds_left:02}"


def format_byte_rate(bytes_per_second: float) -> str:
    """``9.8 kB/s``; three digits and a decimal unit."""
    value, units = float(bytes_per_second), iter(("B/s", "kB/s", "MB/s", "GB/s"))
    unit = next(units)
    while value >= 999.5 and unit != "GB/s":
        value, unit = value / 1000, next(units)
    digits = 0 if unit == "B/s" or value >= 99.95 else 1
    return f"{value:5.{digits}f} {unit}"


def _format_step(step: int, total_steps: int) -> str:
    return f"step {step:>{len(str(total_steps))}}/{total_steps}"


def _format_fixed(value: Value, digits: int) -> str:
    """Fixed digits while they fit in the column, else the exponent form; NaN and infinities by name."""
    number, width = float(value), digits + 3
    if abs(number) < 999 or not math.isfinite(number):
        return f"{number:{width}.{digits}f}"
    return f"{number:{width}.{max(width - 6, 0)}e}"


def _unless_nan(show: Callable[[float], str]) -> Callable[[Value], str]:
    return lambda value: "" if math.isnan(float(value)) else show(float(value))


def _json_value(value: Value | None) -> Value | None:
    """JSON has no NaN and no infinities: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


_TRAIN_COLUMNS: dict[str, Callable[[Value], str]] = {
    "loss": lambda value: f"loss {_format_fixed(value, 4)}",
    "bpb": lambda value: f"bpb {_format_fixed(value, 3)}",
    "grad_norm": lambda value: f"grad {_format_fixed(value, 2)}",
    "lr": lambda value: f"lr {value:.1e}",
    "boundary_rate": lambda value: f"seg {value:.3f}",
    "phase": lambda value: f"phase {value}",
    "bytes_per_second": _unless_nan(format_byte_rate),
    "mfu": _unless_nan(lambda value: f"mfu {value:.1%}"),
    "memory_gib": lambda value: f"mem {value:.1f} GiB",
    "eta_seconds": _unless_nan(lambda value: f"eta {format_duration(value)}"),
}
