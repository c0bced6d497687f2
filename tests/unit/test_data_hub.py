"""Hub datasets against a hub on loopback that serves parquet files, and fails."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from .reference.hub import COMMIT, REPOSITORY, StubHub
from .reference.reading import documents_of

REFERENCE = Path(__file__).resolve().parent / "reference"
TEXTS = [f"text number {number}" for number in range(150)]
CARD = b"""---
configs:
- config_name: small
  data_files: [{split: train, path: small/*.parquet}, {split: test, path: test/*.parquet}]
- config_name: broken
  data_files: [{split: train, path: broken/*.parquet}]
- config_name: lines
  data_files: [{split: train, path: lines/*.jsonl}]
---
"""


def parquet(texts: list[str | None], row_group_size: int = 8) -> bytes:
    file = io.BytesIO()
    table = pa.table({"id": range(len(texts)), "text": pa.array(texts, pa.string())})
    pq.write_table(table, file, row_group_size=row_group_size, compression="none")
    return file.getvalue()


class Reader:
    """The program ``hub_reader.py`` on a stub hub."""

    def __init__(self, hub: StubHub, home: Path) -> None:
        self.hub = hub
        self.environment = {
            **os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1",
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REFERENCE.parents[2]),
        }  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, str(REFERENCE / "hub_reader.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment,
        )  # fmt: skip

    def read(
        self, *, steps: tuple[int, int] = (0, 4), cursors: Any = None, world_size: int = 1, retry: float = 5.0,
        workers: int = 0, held_out: float = 0.0, bad: str = "skip", **source: Any,
    ) -> dict[str, Any]:  # fmt: skip
        data = {
            "hub_retry_seconds": retry, "num_workers": workers, "held_out_fraction": held_out, "on_bad_record": bad
        }  # fmt: skip
        request = {
            "source": {"dataset": REPOSITORY, "name": "small", **source},
            "data": data, "steps": steps, "cursors": cursors or {}, "world_size": world_size,
        }  # fmt: skip
        assert self.process.stdin and self.process.stdout
        self.hub.requests.clear()
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    hub = StubHub(
        {
            "README.md": CARD,
            "small/0.parquet": parquet(TEXTS[:100]),
            "small/1.parquet": parquet([]),
            "small/2.parquet": parquet(TEXTS[100:]),
            "test/0.parquet": parquet([f"test {number}" for number in range(60)]),
            "broken/0.parquet": parquet([None if number % 5 == 0 else f"good {number}" for number in range(60)]),
            "lines/0.jsonl": b'{"text": "x"}\n',
        }
    )
    reader = Reader(hub, tmp_path_factory.mktemp("home"))
    yield reader
    assert reader.process.stdin
    reader.process.stdin.close()
    reader.process.wait(timeout=20)
    hub.close()


@pytest.fixture(autouse=True)
def working_hub(reader: Reader) -> None:
    reader.hub.fail = lambda path: None


def data_requests(reader: Reader) -> list[tuple[str, str]]:
    """Path and range of the requests for parquet files."""
    return [(path, range_) for _, path, range_ in reader.hub.requests if path.endswith(".parquet")]


def texts_in(reply: dict[str, Any]) -> list[str]:
    return [document.decode() for rows in reply["rows"].values() for document in documents_of(rows)]


def test_streams_every_text_once_an_epoch(reader: Reader) -> None:
    reply = reader.read(steps=(0, 20))
    read = texts_in(reply)
    assert set(read) <= set(TEXTS) and len(read) == len(set(read)) > 50
    later = reader.read(steps=(20, 80), cursors=reply["cursors"])
    assert {*read, *texts_in(later)} == set(TEXTS)
    assert reply["describe"] == (
        f"web: hub dataset {REPOSITORY} at {COMMIT}, split train, 3 parquet files, read block by block"
    )


def test_reads_ranges_of_the_pinned_commit(reader: Reader) -> None:
    reader.read(revision="main")
    requests = data_requests(reader)
    assert requests and all(COMMIT in path and range_.startswith("bytes=") for path, range_ in requests)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_divide_the_rows_of_one(reader: Reader, world_size: int, workers: int) -> None:
    assert reader.read(world_size=world_size, workers=workers)["rows"] == reader.read()["rows"]


def test_two_resumes_with_other_ranks_change_nothing(reader: Reader) -> None:
    expected = reader.read(steps=(0, 30))["rows"]
    rows: dict[str, list] = {shard: [] for shard in expected}
    cursors: Any = None
    for start, end, world_size in ((0, 5, 1), (5, 17, 3), (17, 30, 2)):
        reply = reader.read(steps=(start, end), cursors=cursors, world_size=world_size)
        cursors = reply["cursors"]
        for shard, part in reply["rows"].items():
            rows[shard] += part
    assert rows == expected


def test_a_resume_far_on_asks_for_no_more_than_one_near_the_beginning(reader: Reader) -> None:
    counts = []
    for steps in (3, 120):
        cursors = reader.read(steps=(0, steps))["cursors"]
        reader.read(steps=(steps, steps + 1), cursors=cursors)
        counts.append(len(data_requests(reader)))
    assert counts[1] <= counts[0] + 4


def test_held_out_documents_are_not_trained_on(reader: Reader) -> None:
    reply = reader.read(steps=(0, 80), held_out=0.2)
    trained = set(texts_in(reply))
    ids = [number for batch in reply["held_out"] for row in batch for number in row]
    held_out = bytes(number if number < 256 else 0 for number in ids).decode().split("\0")
    assert {text for text in held_out if text} == set(TEXTS) - trained
    assert 10 < len(set(TEXTS) - trained) < 60


def test_several_configurations_and_splits(reader: Reader) -> None:
    read = set(texts_in(reader.read(steps=(0, 80), name=["small", "broken"])))
    assert any(text in TEXTS for text in read) and any(text.startswith("good") for text in read)
    assert all(text.startswith("test") for text in texts_in(reader.read(split="test")))


def test_bad_records_are_named_or_stop(reader: Reader) -> None:
    reply = reader.read(name="broken", steps=(0, 20))
    assert set(texts_in(reply)) <= {f"good {number}" for number in range(60) if number % 5}
    assert any("missing field: http" in line and "record " in line for line in reply["log"])
    reply = reader.read(name="broken", steps=(0, 20), bad="stop")
    assert reply["error"].startswith("data.sources.web: http") and "on_bad_record" in reply["error"]


@pytest.mark.parametrize("failure", [429, 503, 500, "cut"])
def test_what_passes_is_tried_again(reader: Reader, failure: int | str) -> None:
    expected = reader.read()["rows"]
    calls = itertools.count()
    reader.hub.fail = lambda path: failure if path.endswith(".parquet") and next(calls) % 3 != 2 else None
    reply = reader.read()
    assert reply["rows"] == expected
    assert any("data.sources.web: the hub failed, trying again" in line for line in reply["log"])


@pytest.mark.parametrize("failure", [429, 503])
def test_the_list_of_files_is_asked_for_again(reader: Reader, failure: int) -> None:
    calls = itertools.count()
    reader.hub.fail = lambda path: failure if path.endswith("README.md") and next(calls) < 2 else None
    assert "rows" in reader.read()


@pytest.mark.parametrize("failure", [429, 503, "cut"])
@pytest.mark.parametrize("workers", [0, 1])
def test_what_does_not_pass_ends_with_the_name_of_the_source(reader: Reader, failure: int | str, workers: int) -> None:
    reader.hub.fail = lambda path: failure if path.endswith(".parquet") else None
    error = reader.read(retry=0.2, workers=workers)["error"]
    assert error.startswith("data.sources.web: the hub failed, tried for 0 s (data.hub_retry_seconds = 0.2)")
    assert "\n" not in error
    assert len(data_requests(reader)) >= 2


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"dataset": "someone/nothing"}, "doesn't exist on the Hub"),
        ({"name": "missing"}, "missing"),
        ({"split": "validation"}, "has no split 'validation'; there are: train, test"),
        ({"name": "lines"}, "files that are not parquet, such as .*0.jsonl.*prepare"),
    ],
)
def test_what_is_not_there_is_named_at_once(reader: Reader, source: dict[str, str], words: str) -> None:
    reply = reader.read(retry=100.0, **source)

    assert reply["error"].startswith("data.sources.web")
    assert re.search(words, reply["error"])


def test_the_code_of_a_dataset_is_refused(reader: Reader, tmp_path: Path) -> None:
    reader.hub.files["texts.py"] = f"open({str(tmp_path / 'was_run')!r}, 'w')\n".encode()
    try:
        error = reader.read()["error"]
    finally:
        del reader.hub.files["texts.py"]
    assert error.startswith("data.sources.web: ") and "script" in error
    assert not (tmp_path / "was_run").exists()


def test_prepare_copies_a_hub_dataset(reader: Reader, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        f"""
        [training]
        steps = 1
        [data.sources.web]
        kind = "hub"
        dataset = "{REPOSITORY}"
        name = ["small", "lines"]
        [[data.phases]]
        weights = {{ web = 1 }}
        """
    )
    command = ["-m", "spider_titan.tools.prepare", "--source", "web", "--config", "run.toml", "--out", "out"]
    # A home of its own: the library keeps what the other tests made it download.
    environment = {**reader.environment, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    copied = [text for path in sorted((tmp_path / "out").glob("*")) if path.suffix == ".parquet"
              for text in pq.read_table(path)["text"].to_pylist()]  # fmt: skip
    assert [text.decode() for text in copied] == [*TEXTS, "x"]
