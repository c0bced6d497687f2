"""Measures contenders side by side: they take turns, so whatever else the machine does falls on all of them alike.

One thread is the default of all benchmarks. With more, a kernel that is done in a millisecond waits for the slowest
thread, and on a machine that does anything else the waiting is what is measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.utils.benchmark import Timer


def start(what: str, *, threads: int, repetitions: int) -> None:
    """Sets torch's number of threads and says what is measured how."""
    torch.set_num_threads(threads)
    plural = "" if threads == 1 else "s"
    print(
        f"{what}; fp32, torch {torch.__version__}, {threads} thread{plural}, medians of {repetitions} calls in turns\n"
    )


def medians(contenders: Mapping[str, Callable[[], object]], *, repetitions: int) -> dict[str, float]:
    """Median seconds of one call of each contender.

    Every contender runs once unmeasured, then all take turns ``repetitions`` times.
    """
    threads = torch.get_num_threads()
    timers = {name: Timer("run()", globals={"run": run}, num_threads=threads) for name, run in contenders.items()}
    for run in contenders.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repetitions):
        for name, timer in timers.items():
            seconds[name].append(timer.timeit(1).median)
    return {name: statistics.median(values) for name, values in seconds.items()}


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a Markdown table: the first column to the left, the others to the right."""
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    rule = ["-" * width if index == 0 else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    for row in (head, rule, *rows):
        cells = [cell.ljust(widths[0]) if index == 0 else cell.rjust(widths[index]) for index, cell in enumerate(row)]
        print(f"| {' | '.join(cells)} |")


def milliseconds(seconds: float) -> str:
    """``12.3``: milliseconds with three digits or so."""
    return f"{seconds * 1e3:.1f}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def relative_difference(result: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest absolute difference, as a share of the reference's largest absolute value."""
    return float((result - reference).detach().abs().max() / reference.detach().abs().max())
