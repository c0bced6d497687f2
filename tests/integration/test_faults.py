"""A rank that raises, dies or hangs ends the job, and the launcher names it; real runs of two ranks."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
STEPS = 6

TINY = """
[job]
import = ["faulty_model"]
[model]
name = "faulty"
hidden_size = 16
num_heads = 2
num_layers = 1
intermediate_size = 16
q_lora_rank = 8
kv_lora_rank = 8
qk_nope_head_dim = 4
qk_rope_head_dim = 4
v_head_dim = 4
[training]
steps = 6
seq_len = 32
local_batch_size = 1
[lr_scheduler]
warmup_steps = 2
[validation]
enable = false
[metrics]
log_freq = 1
enable_tensorboard = false
[comm]
train_timeout_seconds = 2
[[data.phases]]
until = 1.0
weights = { english = 1.0 }
"""

# FAULTS lists, for each attempt, what happens on which rank at the third step.
FAULTY_MODEL = """
import dataclasses, os, signal, time
from spider_titan.spec import get_model_spec, register_model_spec

base = get_model_spec("byte_transformer")
faults = os.environ["FAULTS"].split()
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
kind, _, victim = (faults[attempt] if attempt < len(faults) else "none@0").partition("@")
calls = 0

def loss(model, batch, context):
    global calls
    calls += 1
    if calls == 3 and os.environ["RANK"] == victim:
        if kind == "raise":
            raise LookupError("the shelf is empty")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "hang":
            time.sleep(3600)
    return base.loss(model, batch, context)

register_model_spec(dataclasses.replace(base, name="faulty", loss=loss))
"""

SRUN = """#!/usr/bin/env bash
# Stands in for srun: starts the task of every node here.
while [[ $1 == --* ]]; do shift 2; done
tasks=()
for ((node = 0; node < NNODES; node++)); do
    SLURM_NODEID=$node "$@" &
    tasks+=($!)
done
status=0
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit "$status"
"""

SCONTROL = """#!/usr/bin/env bash
[[ "$*" == "show hostnames node[1-2]" ]] && printf '127.0.0.1\\n127.0.0.2\\n'
"""

pytestmark = [pytest.mark.integration, pytest.mark.distributed]


@dataclass
class Run:
    """A finished job."""

    status: int
    output: str
    folder: Path

    @property
    def last_line(self) -> str:
        return self.output.splitlines()[-1].partition("  ")[2]

    def lines(self, part: str) -> list[str]:
        return [line for line in self.output.splitlines() if part in line]

    def assert_nothing_is_left(self) -> None:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                command, cwd = (folder / "cmdline").read_bytes(), (folder / "cwd").readlink()
            except OSError:  # ended meanwhile, or not ours
                continue
            assert cwd != self.folder or b"spider_titan" not in command, command


def run(folder: Path, *arguments: str, script: str = "run_train.sh", **variables: str) -> Run:
    """Runs a script on two ranks of the faulty model in ``folder``."""
    (folder / "tiny.toml").write_text(TINY)
    (folder / "faulty_model.py").write_text(FAULTY_MODEL)
    result = subprocess.run(
        [str(REPOSITORY / script), "--job.config_file", "tiny.toml", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NGPU": "2", "FAULTS": "", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    finished = Run(result.returncode, result.stdout, folder)
    finished.assert_nothing_is_left()
    return finished


def test_ranks_that_die_and_hang_are_named_and_started_again(tmp_path: Path) -> None:
    job = run(tmp_path, FAULTS="kill@0 hang@0", MAX_RESTARTS="2")
    assert job.status == 0, job.output
    first, second = (line.partition("first failure: ")[2] for line in job.lines("first failure"))
    assert first.startswith("rank 0, killed by signal 9")
    assert re.match(r"rank 0, no answer from it; rank 1 saw: .*2000ms.* \(exit status 1\)$", second)
    assert [line.rpartition("attempt")[2] for line in job.lines("starting all ranks again")] == [" 2 of 3", " 3 of 3"]
    assert len(job.lines(f"done: {STEPS} steps")) == 1
    kept = [tmp_path / "outputs" / name for name in ("run", "run.1", "run.2")]
    assert [len((folder / "metrics.jsonl").read_text().splitlines()) for folder in kept] == [STEPS, 2, 2]


def test_a_rank_that_raises_is_shown_once_and_one_that_hangs_ends_the_job(tmp_path: Path) -> None:
    job = run(tmp_path, FAULTS="raise@0 hang@1", MAX_RESTARTS="1")
    assert job.status == 1, job.output
    raised, hung = (line.partition("first failure: ")[2] for line in job.lines("first failure"))
    assert raised == "rank 0, LookupError: the shelf is empty (exit status 1)"
    assert re.match(r"rank 1, no answer from it; rank 0 saw: .*2000ms.* \(exit status 1\)$", hung)
    assert job.last_line.startswith("ERROR  first failure: rank 1, no answer")
    assert len(job.lines("rank 0 raised")) == len(job.lines("Traceback")) == 1
    assert len(job.lines("ERROR")) == 3, "the other rank has nothing of its own to say"
    logs = [(tmp_path / "outputs" / name / "logs" / "train.log").read_text() for name in ("run.1", "run")]
    assert "Traceback" in logs[0] and "LookupError: the shelf is empty" in logs[0]
    assert "no answer from it" in logs[1] and "Traceback" not in logs[1]


def test_a_rank_that_is_killed_gives_its_status(tmp_path: Path) -> None:
    job = run(tmp_path, FAULTS="kill@1")
    assert job.status == 128 + signal.SIGKILL, job.output
    assert job.last_line.startswith("ERROR  first failure: rank 1, killed by signal 9 (SIGKILL")
    assert not job.lines("Traceback")


def test_a_mistake_that_all_ranks_find_is_one_line(tmp_path: Path) -> None:
    job = run(tmp_path, "--data.sources.english.kind", "files", "--data.sources.english.part", "None",
              "--data.sources.english.path", "nowhere/*.jsonl")  # fmt: skip
    assert job.status == 2, job.output
    [line] = job.output.splitlines()
    assert line.partition("  ")[2].startswith("ERROR  data.sources.english.path: no file matches")


def test_two_nodes_of_a_slurm_job_fail_and_train_together(tmp_path: Path) -> None:
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_SUBMIT_DIR": str(REPOSITORY),
        "MASTER_PORT": str(port),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    job = run(tmp_path, script="scripts/slurm_train.sh", NGPU="", FAULTS="raise@1", MAX_RESTARTS="1", **slurm)
    assert job.status == 0, job.output
    causes = [line.partition("first failure: ")[2] for line in job.lines("first failure")]
    assert causes == ["rank 1, LookupError: the shelf is empty (exit status 1)"] * 2, "each node's launcher knows it"
    assert len(job.lines("rank 1 raised")) == 1
    assert len(job.lines(" on 2 x ")) == 2 and len(job.lines(f"done: {STEPS} steps")) == 1
