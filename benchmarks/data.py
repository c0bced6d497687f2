"""Documents to packed batches by one worker: vectorised, as this package does it, against lists of ids.

Both read the same documents from the same files and make the same batches; the lists are what a tokenizer that returns
Python integers leads to. The second table is how long the first batch of a resumed run takes.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import tyro
from timing import medians, milliseconds, print_table

from spider_titan.curriculum import Curriculum, PhaseConfig
from spider_titan.data.config import DataConfig, SourceConfig
from spider_titan.data.documents import TrainingSource
from spider_titan.data.loader import TrainLoader, build_train_loader
from spider_titan.data.records import read_records
from spider_titan.data.rows import Cursor
from spider_titan.data.sources import load_sources
from spider_titan.vocabulary import BOS_ID, EOS_ID

NUM_SHARDS, BATCH_SIZE = 8, 8


def draw_documents(num_documents: int) -> list[str]:
    """Texts of 200 to 8,000 characters."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(2000)]
    return [" ".join(rng.choices(words, k=rng.randint(30, 1200))) for _ in range(num_documents)]


def write(folder: Path, documents: list[str]) -> dict[str, str]:
    """The documents in each format; returns format -> path."""
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    pq.write_table(pa.table({"text": documents}), folder / "a.parquet", row_group_size=1000)
    return {"jsonl": str(folder / "a.jsonl"), "parquet": str(folder / "a.parquet")}


def config_of(path: str, *, in_place: bool) -> DataConfig:
    source = SourceConfig(kind="files", path=path, in_place=in_place)
    return DataConfig({"mine": source}, [PhaseConfig(weights={"mine": 1})], held_out_fraction=0.0)


def open_loader(
    config: DataConfig, sources: dict[str, TrainingSource], seq_len: int, cursors: dict[int, Cursor] | None = None
) -> TrainLoader:
    return build_train_loader(
        config,
        sources,
        Curriculum(config.phases, byte_budget=10**12, bytes_per_step=NUM_SHARDS * seq_len),
        seq_len=seq_len,
        batch_size=BATCH_SIZE,
        num_rows=NUM_SHARDS,
        seed=0,
        cursors={"mine": cursors} if cursors else None,
    )


def list_batches(path: str, seq_len: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of a file by way of lists of ids, in the file's order."""
    waiting: list[int] = []
    rows: list[list[int]] = []
    for document in read_records(path, path.rsplit(".", 1)[-1], "text"):
        assert isinstance(document, bytes)
        waiting += [BOS_ID, *list(document), EOS_ID]
        while len(waiting) > seq_len:
            rows.append(waiting[: seq_len + 1])
            waiting = waiting[seq_len:]
            if len(rows) == BATCH_SIZE:
                yield torch.tensor([row[:-1] for row in rows]), torch.tensor([row[1:] for row in rows])
                rows = []


def compare_rates(paths: dict[str, str], seq_len: int, num_batches: int, repetitions: int) -> list[list[str]]:
    """A row of the first table a format."""
    num_bytes = num_batches * BATCH_SIZE * seq_len
    rows = []
    for name, path in paths.items():
        config = config_of(path, in_place=False)
        sources = load_sources(config)

        def vectorised() -> None:
            loader = open_loader(config, sources, seq_len)  # noqa: B023
            for _ in range(num_batches):
                next(loader)

        def with_lists() -> None:
            for _, _ in zip(range(num_batches), list_batches(path, seq_len), strict=False):  # noqa: B023
                pass

        seconds = medians({"vectorised": vectorised, "lists": with_lists}, repetitions=repetitions)
        rates = {way: num_bytes / taken / 1e6 for way, taken in seconds.items()}
        rows.append(
            [
                name,
                f"{rates['vectorised']:.0f}",
                f"{rates['lists']:.1f}",
                f"{rates['vectorised'] / rates['lists']:.0f}x",
            ]
        )
    return rows


def seek_rows(folder: Path, num_documents: int, repetitions: int) -> list[list[str]]:
    """A row of the second table for each way to read a source."""
    documents = [f"number {number} " * 20 for number in range(num_documents)]
    pq.write_table(pa.table({"text": documents}), folder / "many.parquet", row_group_size=1000)
    rows = []
    for in_place in (False, True):
        config = config_of(str(folder / "many.parquet"), in_place=in_place)
        sources = load_sources(config)
        near, far = ({shard: cursor_at(sources["mine"], shard, number) for shard in range(NUM_SHARDS)}
                     for number in (10, num_documents * 2 // 3))  # fmt: skip

        def resume(cursors: dict[int, Cursor]) -> Callable[[], object]:
            # Opened anew each time: what an earlier call has read must not help.
            return lambda: next(open_loader(config, load_sources(config), 512, cursors))  # noqa: B023

        seconds = medians({"near": resume(near), "far": resume(far)}, repetitions=repetitions)
        rows.append(
            [
                "in place" if in_place else "table",
                milliseconds(seconds["near"]),
                milliseconds(seconds["far"]),
                f"{seconds['far'] / seconds['near']:.2f}x",
            ]
        )
    return rows


def cursor_at(source: TrainingSource, shard: int, number: int) -> Cursor:
    """Of the first document of a shard after all shards together have read ``number`` documents."""
    documents = source.documents(shard, num_shards=NUM_SHARDS, seed=0)
    for _ in range(number // NUM_SHARDS):
        next(documents)
    position, _ = next(documents)
    return Cursor(position, 0)


def main(
    num_documents: int = 2_000, seq_len: int = 2048, num_batches: int = 200, seek_documents: int = 300_000,
    repetitions: int = 5,
) -> None:  # fmt: skip
    """Measures bytes a second, and the first batch of a resumed run.

    Args:
        num_documents: Of the first table.
        seq_len: L, positions a row.
        num_batches: Batches of 8 rows a call.
        seek_documents: Of the second table; a resume far on is at two thirds of them.
        repetitions: Calls of each contender.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        os.environ["HF_DATASETS_CACHE"] = os.path.join(name, "cache")
        paths = write(Path(name), draw_documents(num_documents))
        print(f"one worker, {BATCH_SIZE} rows of {seq_len} a batch, medians of {repetitions} calls in turns\n")
        rows = compare_rates(paths, seq_len, num_batches, repetitions)
        print_table(["format", "vectorised MB/s", "lists MB/s", "ratio"], rows)
        print()
        rows = seek_rows(Path(name), seek_documents, repetitions)
        print_table(["read from", "at document 10, ms", f"at {seek_documents * 2 // 3:,}, ms", "ratio"], rows)


if __name__ == "__main__":
    tyro.cli(main)
