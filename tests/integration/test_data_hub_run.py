"""Whole runs of two ranks on a hub dataset, from a hub on loopback."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.integration

CONFIG = """
[model]
name = "byte_transformer"
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
steps = 4
seq_len = 32
local_batch_size = 1
[lr_scheduler]
warmup_steps = 2
[validation]
freq = 4
bytes = 200
[metrics]
log_freq = 1
enable_tensorboard = false
[data]
held_out_fraction = 0.1
hub_retry_seconds = 2.5
num_workers = 1
[data.sources.web]
kind = "hub"
dataset = "someone/texts"
[[data.phases]]
weights = { web = 1.0 }
"""


def stub_hub() -> ModuleType:
    path = REPOSITORY / "tests" / "unit" / "reference" / "hub.py"
    spec = importlib.util.spec_from_file_location("stub_hub", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hub() -> Iterator[object]:
    files = {}
    for number in range(2):
        file = io.BytesIO()
        texts = [f"file {number} text {index} " * 5 for index in range(60)]
        pq.write_table(pa.table({"text": texts}), file, row_group_size=5, compression="none")
        files[f"data/train-{number}.parquet"] = file.getvalue()
    hub = stub_hub().StubHub(files)
    yield hub
    hub.close()


def run(folder: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.toml").write_text(CONFIG)
    environment = {
        **os.environ, "NGPU": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "HF_ENDPOINT": url,
        "HF_HOME": str(folder / "home"), "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    return subprocess.run(
        [str(REPOSITORY / "run_train.sh"), "--job.config_file", "run.toml", "--job.dump_folder", "out", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def test_a_run_streams_and_outlives_a_busy_hub(tmp_path: Path, hub) -> None:  # noqa: ANN001
    seen: set[str] = set()

    def fail_first(path: str) -> int | None:
        is_new = path not in seen and path.endswith(".parquet")
        seen.add(path)
        return 503 if is_new else None

    hub.fail = fail_first
    done = run(tmp_path, hub.url)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "lm_loss" in line] == [1, 2, 3, 4]
    assert any("validation_bpb" in line for line in lines)
    assert "data: web: hub dataset someone/texts at " in done.stdout
    assert "data.sources.web: the hub failed, trying again" in done.stdout + done.stderr


def test_a_hub_that_stays_away_ends_all_ranks_with_the_name_of_the_source(tmp_path: Path, hub) -> None:  # noqa: ANN001
    metrics = tmp_path / "out" / "metrics.jsonl"
    # Start-up and the first steps are served; then the hub is gone.
    hub.fail = lambda path: 503 if path.endswith(".parquet") and metrics.exists() and metrics.stat().st_size else None
    done = run(tmp_path, hub.url, "--training.steps", "5000", "--validation.freq", "5000")
    assert done.returncode == 1
    assert "data.sources.web: the hub failed, tried for" in done.stdout + done.stderr
