"""Traces, memory snapshots, Weights & Biases: what a run writes beside its metrics, if it is asked to."""

from __future__ import annotations

import errno
import gzip
import json
import logging
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from spider_titan.config import load_config
from spider_titan.console import LOGGER_NAME, add_log_file
from spider_titan.distributed import CommConfig, ParallelismConfig, World, join_world
from spider_titan.profiling import Profiler, ProfilingConfig
from spider_titan.run_directory import DiskError
from spider_titan.wandb_log import WeightsAndBiases

from .reference.tiny import BYTE_TRANSFORMER_TOML
from .test_trainer import assert_same, make_trainer, train

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world(ParallelismConfig(), CommConfig()) as world:
        yield world


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_run_writes_its_traces_and_computes_the_same(world: World, tmp_path: Path) -> None:
    options = ("--profiling.enable_profiling", "--profiling.profile_freq", "3", "--profiling.profiler_warmup", "1")
    _, plain = train(world, tmp_path / "a", model=BYTE_TRANSFORMER_TOML)
    _, profiled = train(world, tmp_path / "b", *options, model=BYTE_TRANSFORMER_TOML)
    assert_same(profiled, plain)
    assert not (tmp_path / "a" / "run" / "profile_traces").exists()
    traces = tmp_path / "b" / "run" / "profile_traces"
    # Eight steps; the third trace would end with the ninth.
    assert files_in(traces) == ["step-3/rank-0.json.gz", "step-6/rank-0.json.gz"]
    with gzip.open(traces / "step-6" / "rank-0.json.gz", "rt") as file:
        names = [event.get("name", "") for event in json.load(file)["traceEvents"]]
    assert {"aten::mm", "aten::_fused_adamw_"} & set(names)
    # One step alone: as many as that step has, not those of all three.
    assert sum(name.startswith("ProfilerStep#") for name in names) in (1, 2)


def test_steps_of_a_trace(tmp_path: Path) -> None:
    config = ProfilingConfig(
        enable_profiling=True, profile_freq=4, profiler_active=2, profiler_warmup=1, save_traces_folder="t"
    )
    step, pauses = 0, []

    @contextmanager
    def paused() -> Iterator[None]:
        before = set(files_in(tmp_path))
        yield
        pauses.append((step, set(files_in(tmp_path)) - before))

    with Profiler(config, tmp_path, rank=3, device=CPU) as profiler:
        for step in range(5, 13):
            for _ in range(step):
                torch.ones(()).exp_()
            profiler.step(step, paused)
    # A pause waits for the device.
    assert pauses == [(8, {"t/step-8/rank-3.json.gz"}), (12, {"t/step-12/rank-3.json.gz"})]
    assert files_in(tmp_path) == ["t/step-12/rank-3.json.gz", "t/step-8/rank-3.json.gz"]
    with gzip.open(tmp_path / "t/step-8/rank-3.json.gz", "rt") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("aten::exp_") == 7 + 8


def test_a_trace_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("a file in the way")
    config = ProfilingConfig(enable_profiling=True, profile_freq=1, profiler_warmup=0, save_traces_folder="t")
    with pytest.raises(DiskError, match=r"cannot write .*rank-0\.json\.gz"):  # noqa: SIM117
        with Profiler(config, tmp_path, rank=0, device=CPU) as profiler:
            profiler.step(1)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"profile_freq": 3}, "profile_freq = 3 must be at least profiler_warmup . profiler_active = 3 . 1"),
        ({"profiler_active": 0}, "profiler_active = 0 must be at least 1"),
        ({"save_traces_folder": "/tmp"}, 'save_traces_folder = "/tmp" must name a folder within'),
        ({"save_memory_snapshot_folder": "a/../../b"}, "save_memory_snapshot_folder .* within the run directory"),
    ],
)
def test_mistakes(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ProfilingConfig(**settings)


def test_memory_snapshots_need_cuda(world: World, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="enable_memory_snapshot = true needs a CUDA device, and this run is on cpu"):
        make_trainer(world, tmp_path, "--profiling.enable_memory_snapshot")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Calls of CUDA's recorder, which a machine without CUDA cannot run."""
    calls: list[Any] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **arguments: calls.append(arguments))
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    return calls


def test_memory_snapshots(tmp_path: Path, recorder: list[Any]) -> None:
    config = ProfilingConfig(enable_memory_snapshot=True, profile_freq=4, save_memory_snapshot_folder="m")
    with pytest.raises(torch.OutOfMemoryError), Profiler(config, tmp_path, rank=1, device=CUDA) as profiler:
        for step in range(1, 10):
            profiler.step(step)
        raise torch.OutOfMemoryError
    names = ["step-4", "step-8", "step-9-out-of-memory"]
    assert files_in(tmp_path) == [f"m/{name}/rank-1.pickle" for name in names]
    assert recorder == [{"max_entries": 100_000}, {"enabled": None}]


@pytest.mark.gpu
def test_memory_snapshots_on_a_device(tmp_path: Path) -> None:
    config = ProfilingConfig(enable_memory_snapshot=True, enable_profiling=True, profile_freq=4)
    with Profiler(config, tmp_path, rank=0, device=CUDA) as profiler:
        for step in range(1, 5):
            torch.ones(64, 64, device="cuda").mm(torch.ones(64, 64, device="cuda"))
            profiler.step(step)
    files = files_in(tmp_path)
    assert files == ["memory_snapshot/step-4/rank-0.pickle", "profile_traces/step-4/rank-0.json.gz"]
    assert (tmp_path / files[0]).stat().st_size > 1000


class FakeRun:
    """What ``wandb.init`` returns."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments, self.logged, self.finished = arguments, [], False

    def log(self, values: dict[str, Any], *, step: int) -> None:
        assert not self.finished
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """Stands for the package, and holds the runs that were begun."""
    runs: list[FakeRun] = []
    module: Any = types.ModuleType("wandb")
    module.util = types.SimpleNamespace(generate_id=lambda: f"id{len(runs)}")
    module.init = lambda **arguments: runs.append(FakeRun(arguments)) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return runs


def test_weights_and_biases_gets_the_numbers(world: World, tmp_path: Path, wandb_runs: list[FakeRun]) -> None:
    lines, _ = train(world, tmp_path, "--metrics.enable_wandb", model=BYTE_TRANSFORMER_TOML)
    (run,) = wandb_runs
    assert run.finished
    assert run.arguments["name"] == "run"
    assert run.arguments["project"] == "spider_titan"
    assert "enable_wandb = true" in run.arguments["config"]["toml"]
    steps = {step: values for step, values in run.logged if "loss" in values}
    assert list(steps) == [line["step"] for line in lines]
    for line in lines:
        numbers = {key: value for key, value in line.items() if isinstance(value, int | float) and key != "step"}
        assert steps[line["step"]] == numbers
    assert [step for step, values in run.logged if "validation_bpb" in values] == [4, 8]


def test_a_run_that_goes_on_stays_the_same_run(
    tmp_path: Path, wandb_runs: list[FakeRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for _ in range(2):
        WeightsAndBiases(tmp_path, "").close()
    assert [run.arguments["id"] for run in wandb_runs] == ["id0", "id0"]
    assert {run.arguments["resume"] for run in wandb_runs} == {"allow"}
    assert {run.arguments["project"] for run in wandb_runs} == {"mine"}


def test_weights_and_biases_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"enable_wandb = true needs the package wandb, .* run pip install wandb"):
        WeightsAndBiases(tmp_path, "")


def test_it_is_imported_by_those_alone_who_want_it() -> None:
    assert not load_config(["--training.steps", "1"]).metrics.enable_wandb
    assert "wandb" not in sys.modules


def no_space(source: str, target: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_log_file_is_renamed_and_no_line_lost(tmp_path: Path) -> None:
    logger = logging.getLogger(LOGGER_NAME)
    before, level = list(logger.handlers), logger.level
    logger.setLevel(logging.INFO)
    add_log_file(tmp_path / "train.log", max_bytes=500, max_old_files=20)
    handler: Any = (set(logger.handlers) - set(before)).pop()
    try:
        for number in range(60):
            logger.info("line %d", number)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert len(names) > 3
        assert all(path.stat().st_size <= 500 for path in tmp_path.iterdir())
        in_order = sorted(tmp_path.iterdir(), key=lambda path: -int(path.suffix[1:]) if path.suffix != ".log" else 0)
        text = "".join(path.read_text() for path in in_order)
        assert [line.split()[-1] for line in text.splitlines()] == [str(number) for number in range(60)]
        # Where a file cannot be renamed, the line that needs it ends the run.
        handler.rotator = no_space
        with pytest.raises(DiskError, match=r"^cannot write [^:]*train\.log: [^:]*; free some space"):
            for number in range(60):
                logger.info("line %d", number)
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.setLevel(level)
