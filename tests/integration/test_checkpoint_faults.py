"""Whole runs that are killed, stopped by signals, and run out of disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spider_titan.checkpoint import folders

pytestmark = pytest.mark.integration

TINY = """
[model]
name = "byte_transformer"
hidden_size = 32
num_heads = 2
num_layers = 2
intermediate_size = 32
q_lora_rank = 16
kv_lora_rank = 16
qk_nope_head_dim = 8
qk_rope_head_dim = 8
v_head_dim = 8
[training]
steps = 40
seq_len = 64
local_batch_size = 1
global_batch_size = 2
[lr_scheduler]
warmup_steps = 2
[validation]
freq = 20
bytes = 500
[metrics]
log_freq = 1
[checkpoint]
enable = true
interval = 2
"""
KILLER = """
import os, random, signal, threading, time

def kill():
    # From here on, at a moment that no code can foresee.
    time.sleep(random.Random(int(os.environ["KILL_SEED"])).uniform(0.0, 1.2))
    os.kill(os.getpid(), signal.SIGKILL)

if "KILL_SEED" in os.environ:
    from spider_titan.plugins import Plugin, register_plugin
    started = []
    def after_step(model, context):
        if not started:
            started.append(threading.Thread(target=kill, daemon=True))
            started[0].start()
    register_plugin(Plugin("killer", lambda model, spec, context: model, after_step), before="fsdp")
"""
STOPPER = """
import os, signal
from spider_titan.plugins import Plugin, register_plugin
calls = 0
def after_step(model, context):
    # The first call comes before the first step.
    global calls
    calls += 1
    if calls == int(os.environ.get("STOP_AT", "0")) + 1:
        os.kill(os.getpid(), signal.SIGTERM)
register_plugin(Plugin("stopper", lambda model, spec, context: model, after_step), before="fsdp")
"""
BOMB = """
import atexit, os, pathlib

class Bomb:
    def __del__(self):
        os.abort()

bomb = Bomb()
atexit.register(pathlib.Path("left").touch)
"""
TIMES = {"bytes_per_second", "eta_seconds", "loader_wait"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a configuration and a module that kills its process."""
    (tmp_path / "tiny.toml").write_text(TINY)
    (tmp_path / "killer.py").write_text(KILLER)
    (tmp_path / "stopper.py").write_text(STOPPER)
    return tmp_path


def command(*options: str, ranks: int = 1, name: str = "run") -> list[str]:
    arguments = [
        "--job.config_file",
        "tiny.toml",
        "--job.dump_folder",
        name,
        "--metrics.no-enable_tensorboard",
        *options,
    ]
    if ranks == 1:
        return [sys.executable, "-u", "-m", "spider_titan.train", *arguments]
    return [sys.executable, "-u", "-m", "spider_titan.launch", "--nproc-per-node", str(ranks), "--", *arguments]


def run(folder: Path, arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def logged(folder: Path, name: str = "run") -> list[dict[str, Any]]:
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on(folder: Path) -> None:
    """With a save every 2 steps, by turns in the way of training and beside it. KILLS sets how often it is killed."""
    root, kills = folder / "run" / "checkpoint", int(os.environ.get("KILLS", "5"))
    for number in range(kills):
        mode = ("disabled", "async")[number % 2]
        options = ("--job.import", "killer", "--checkpoint.async_mode", mode, "--training.steps", "1000")
        newest = max((step for step in folders.steps_in(root)), default=0)
        result = run(folder, command(*options), KILL_SEED=str(number))
        assert result.returncode == -signal.SIGKILL, result.stdout
        if newest:
            assert f"going on after step {newest} of 1000" in result.stdout
    steps = str(max(folders.steps_in(root)) + 2)
    assert run(folder, command("--training.steps", steps)).returncode == 0
    assert sorted(path.name for path in root.iterdir() if path.name.startswith(".")) == []
    losses = [line["step"] for line in logged(folder) if "loss" in line]
    assert losses == list(range(1, int(steps) + 1))
    reference = run(
        folder, command("--training.steps", "1000", "--job.import", "stopper", name="unbroken"), STOP_AT=steps
    )
    assert reference.returncode == 75, reference.stdout
    expected = [line for line in logged(folder, "unbroken") if "loss" in line][: int(steps) - 2]
    assert [line for line in logged(folder) if "loss" in line][: int(steps) - 2] == expected


@pytest.mark.parametrize(("ranks", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM)])
def test_a_signal_saves_and_exits_with_75(folder: Path, ranks: int, number: signal.Signals) -> None:
    arguments = command("--training.steps", "100000", "--checkpoint.interval", "100000", ranks=ranks)
    process = subprocess.Popen(
        arguments, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_for_step(folder)
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 75, output
    step = folders.steps_in(folder / "run" / "checkpoint")[0]
    assert f"the state after step {step} is saved" in output
    assert logged(folder)[-1]["step"] == step


def test_a_second_signal_stops_at_once(folder: Path) -> None:
    (folder / "slow.py").write_text(
        "import time\n"
        "from spider_titan.plugins import Plugin, register_plugin\n"
        "def after_step(model, context):\n"
        "    open('slow', 'w').close()\n"
        "    time.sleep(60)\n"
        "register_plugin(Plugin('slow', lambda model, spec, context: model, after_step), before='fsdp')\n"
    )
    process = subprocess.Popen(command("--job.import", "slow"), cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(folder / "slow")
        process.send_signal(signal.SIGTERM)
        time.sleep(2.5)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=10)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGTERM
    assert "once more stops at once" in errors


def test_the_time_limit_ends_a_run_that_goes_on_later(folder: Path) -> None:
    result = run(folder, command("--training.steps", "100000", "--job.time_limit", "1"))
    assert result.returncode == 75, result.stdout
    assert "job.time_limit is reached; the state after step" in result.stdout


def test_what_breaks_at_the_exit_of_python_does_not_change_the_status(folder: Path) -> None:
    (folder / "bomb.py").write_text(BOMB)
    result = run(folder, command("--training.steps", "1", "--job.import", "bomb"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert (folder / "left").exists()


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of 64 MB."""
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_one_line_and_keeps_the_last(folder: Path, small_disk: Path) -> None:
    arguments = command("--training.steps", "4", name="disk/run")
    assert run(folder, arguments).returncode == 0
    rest = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "filler").write_bytes(b"x" * (rest - 150_000))
    result = run(folder, [*arguments, "--training.steps", "8"])
    assert result.returncode == 1
    errors = [line for line in (result.stdout + result.stderr).splitlines() if "ERROR" in line]
    assert len(errors) == 1
    assert "cannot write" in errors[0]
    assert "bytes are needed and" in errors[0]
    (small_disk / "filler").unlink()
    assert run(folder, [*arguments, "--training.steps", "8"]).returncode == 0


def wait_for_step(folder: Path) -> None:
    path = folder / "run" / "metrics.jsonl"
    wait_for(path)
    while len(path.read_text().splitlines()) < 3:
        time.sleep(0.05)


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 90
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
