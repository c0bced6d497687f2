"""Sources that are larger than what a reader may keep in memory; Linux tells how much that is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="/proc tells the memory"),
]

COMMON = """
import json, os, sys
import numpy as np
import pyarrow as pa, pyarrow.parquet as pq
from spider_titan.curriculum import Curriculum, PhaseConfig
from spider_titan.data.config import DataConfig, SourceConfig
from spider_titan.data.loader import build_train_loader
from spider_titan.data.sources import load_sources

def anonymous_mib():
    # What is mapped from a file is not counted: the kernel may drop it at any time.
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024

def batches(path, seq_len=2048, **keys):
    source = SourceConfig(kind="files", path=path, **keys)
    config = DataConfig({"mine": source}, [PhaseConfig(weights={"mine": 1})], held_out_fraction=0.0)
    curriculum = Curriculum(config.phases, byte_budget=10**12, bytes_per_step=4 * seq_len)
    return build_train_loader(
        config, load_sources(config), curriculum, seq_len=seq_len, batch_size=4, num_rows=4, seed=0
    )
"""

MANY = """
in_place = sys.argv[1] == "in place"
body = "x" * 1000
if in_place:
    with pq.ParquetWriter("many.parquet", pa.schema([("text", pa.string())])) as writer:
        for first in range(0, 100_000, 1000):
            writer.write_table(pa.table({"text": [f"{number} {body}" for number in range(first, first + 1000)]}))
else:
    with open("many.jsonl", "w") as file:
        for number in range(100_000):
            file.write(json.dumps({"text": f"{number} {body}"}) + "\\n")
before = anonymous_mib()
loader = batches("many.*", in_place=in_place)
found = [anonymous_mib() - before]
# All of about 100 MB in 4 x 2048 bytes a batch.
for number in range(12_400):
    next(loader)
    if number in (1_000, 6_000, 12_399):
        found.append(anonymous_mib() - before)
print(json.dumps(found))
"""

HUGE = """
document = os.urandom(50_000_000)
open("huge.bin", "wb").write(document)
loader = batches("huge.bin", format="bytes", seq_len=65536)
# The first shard's stream is the document; its rows, one after the other, are a BOS and the bytes.
ids = np.concatenate([next(loader).input_ids[0].numpy() for _ in range(200)])
stored, read = open("huge.bin", "rb").read(), ids[1:].astype(np.uint8).tobytes()
print(json.dumps([stored.startswith(read), len(read)]))
"""


def run(folder: Path, program: str, *arguments: str) -> list:
    environment = {
        **os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(folder / "cache")
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", COMMON + program, *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["table", "in place"])
def test_memory_is_flat_over_100_000_documents(tmp_path: Path, kind: str) -> None:
    opened, early, middle, end = run(tmp_path, MANY, kind)
    # The documents have 100 MB.
    assert max(opened, early, middle, end) < 60
    assert end - early < 12 and middle - early < 12


def test_a_document_of_50_mb_streams_through(tmp_path: Path) -> None:
    is_whole, num_bytes = run(tmp_path, HUGE)
    assert is_whole and num_bytes == 200 * 65536 - 1
