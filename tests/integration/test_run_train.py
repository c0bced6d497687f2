"""Whole runs through run_train.sh, as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path

import pytest

from spider_titan.config import load_config

REPOSITORY = Path(__file__).parents[2]
TINY = [
    *("--training.steps", "12", "--training.seq_len", "64", "--training.local_batch_size", "2"),
    *("--lr_scheduler.warmup_steps", "2", "--metrics.log_freq", "4"),
    *("--validation.freq", "6", "--validation.bytes", "400"),
]

pytestmark = pytest.mark.integration


def run_train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(REPOSITORY / "run_train.sh"), *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NGPU": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def finished(folder: Path) -> subprocess.CompletedProcess[str]:
    return run_train(folder, *TINY)


def test_it_ends_with_status_0_and_says_what_it_did(finished: subprocess.CompletedProcess[str]) -> None:
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for words in (
        "model spider, flavor debug",
        "held out",
        "active per byte",
        "optimizer: adamw; rows of 2 tables move when hit",
        "FLOPs a byte",
        "phase 5/5",
        "done: 12",
    ):
        assert words in finished.stdout
    assert "Traceback" not in finished.stdout + finished.stderr and "Warning" not in finished.stderr


def test_run_directory(finished: subprocess.CompletedProcess[str], folder: Path) -> None:
    run = folder / "outputs" / "debug"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 4, 8, 12]
    assert [line["step"] for line in lines if "validation_bpb" in line] == [6, 12]
    assert lines[0].keys() >= {"epochs/english", "loop_grad_norm/1", "loop_grad_norm/2"}
    assert list((run / "tb").glob("events.*"))
    assert (run / "logs" / "train.log").read_text().splitlines()[0] in finished.stdout
    config = load_config(["--job.config_file", str(run / "config.toml")])
    assert config.training.steps == 12 and config.job.dump_folder == "outputs/debug"
    assert tomllib.loads((run / "config.toml").read_text())["model"]["num_loops"] == 2


def test_tensorboard_has_the_curves(finished: subprocess.CompletedProcess[str], folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "outputs" / "debug" / "tb"))
    events.Reload()
    lines = (folder / "outputs" / "debug" / "metrics.jsonl").read_text().splitlines()
    logged = {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}
    assert {e.step: pytest.approx(e.value, rel=1e-6) for e in events.Scalars("loss/total")} == logged
    assert [e.step for e in events.Scalars("validation/bpb")] == [6, 12]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--training.stepz", "5"], "did you mean --training.steps?"),
        (["--job.config_file", "missing.toml"], "missing.toml"),
        (["--data.sources.english.kind", "files", "--data.sources.english.part", "None",
          "--data.sources.english.path", "nowhere/*.jsonl"], "nowhere/*.jsonl"),
    ],
)  # fmt: skip
def test_a_users_mistake_is_one_line_and_status_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run_train(tmp_path, *TINY, *arguments)
    assert result.returncode == 2
    [line] = [line for line in result.stdout.splitlines() if "ERROR" in line]
    assert message in line
    assert "Traceback" not in result.stdout + result.stderr
    assert not (tmp_path / "outputs").exists()


def test_the_dense_baseline_trains_with_the_same_command(tmp_path: Path) -> None:
    config = REPOSITORY / "train_configs" / "byte_transformer_debug.toml"
    result = run_train(tmp_path, "--job.config_file", str(config), *TINY)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "model byte_transformer" in result.stdout
