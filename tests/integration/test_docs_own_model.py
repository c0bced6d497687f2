"""The model on the page docs/own_model.md, copied from there and trained as the page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "own_model.md"

pytestmark = pytest.mark.integration


def files_on_the_page() -> dict[str, str]:
    """The code blocks that follow a line with a file's name."""
    blocks = re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    return dict(blocks)


def test_the_model_of_the_page_trains(tmp_path: Path) -> None:
    for name, content in files_on_the_page().items():
        (tmp_path / name).write_text(content)
    command = [
        *(sys.executable, "-m", "spider_titan.train", "--job.config_file", "conv.toml"),
        *("--training.steps", "30", "--training.seq_len", "64", "--training.local_batch_size", "4"),
        *("--model.hidden_size", "32", "--model.num_layers", "2", "--lr_scheduler.warmup_steps", "3"),
        *("--optimizer.lr", "1e-2", "--validation.bytes", "2000"),
    ]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [json.loads(line) for line in (tmp_path / "outputs/conv/metrics.jsonl").read_text().splitlines()]
    assert 7.5 < lines[0]["bpb"] < 8.5  # uniform over 272 ids: 8.09
    assert lines[-1]["validation_bpb"] < 5.5


def test_a_key_the_model_does_not_have_is_refused(tmp_path: Path) -> None:
    for name, content in files_on_the_page().items():
        (tmp_path / name).write_text(content.replace('flavor = "debug"', 'flavor = "debug"\nkernel = 3'))
    command = [sys.executable, "-m", "spider_titan.train", "--job.config_file", "conv.toml"]
    variables = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert "conv.toml: [model] has no key 'kernel'; did you mean 'kernel_size'?" in result.stdout + result.stderr
