"""Documents of local files in one memory-mapped table, read by number.

A cached source is a folder: ``documents.arrow`` with the columns document, size and digest, and ``bad_records.json``
with what was left out on the way. It is made aside and appears whole. The folder is in ``HF_DATASETS_CACHE``.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
from filelock import FileLock

from spider_titan.data.documents import digest
from spider_titan.data.problems import BadRecords
from spider_titan.data.records import BadRecord, Record

_SCHEMA = pa.schema([("document", pa.large_binary()), ("size", pa.int64()), ("digest", pa.int64())])

_BATCH_BYTES = 2**23
_BATCH_DOCUMENTS = 4096
"""What a batch of the table holds before it is written: documents are of any length."""


class TableSource:
    """Documents in a memory-mapped table.

    Args:
        path: Of ``documents.arrow``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        self._ends = list(itertools.accumulate(batch.num_rows for batch in batches))
        self._offsets, self._bytes = [], []
        for batch in batches:
            _, offsets, content = batch.column("document").buffers()
            self._offsets.append(np.frombuffer(offsets, dtype=np.int64))
            self._bytes.append(memoryview(content))
        self.sizes = _join([batch.column("size").to_numpy() for batch in batches])
        self.digests = _join([batch.column("digest").to_numpy() for batch in batches])

    def __reduce__(self) -> tuple[type[TableSource], tuple[Path]]:
        return TableSource, (self._path,)

    def __len__(self) -> int:
        return len(self.sizes)

    def document(self, index: int) -> bytes:
        """Document ``index``, from 0, exactly as stored."""
        batch = bisect.bisect_right(self._ends, index)
        row = index - (self._ends[batch - 1] if batch else 0)
        begin, end = self._offsets[batch][row : row + 2].tolist()
        return self._bytes[batch][begin:end].tobytes()


def cache_folder() -> Path:
    """Where cached sources are: in ``HF_DATASETS_CACHE``, with the default that the library ``datasets`` gives it."""
    home = os.environ.get("HF_HOME", os.path.join("~", ".cache", "huggingface"))
    return Path(os.environ.get("HF_DATASETS_CACHE", os.path.join(home, "datasets"))).expanduser() / "spider_titan"


def open_cached(key: str, records: Iterable[Record], bad_records: BadRecords) -> TableSource:
    """Opens the table of ``key``; if there is none, writes it from ``records``, while other ranks wait.

    Args:
        key: A file name that stands for the content of ``records``.
        records: Read only if there is no table.
        bad_records: Is told of the bad ones, whether they are met now or were met when the table was made.
    """
    folder = cache_folder() / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.exists():
            _recall(folder / "bad_records.json", bad_records)
        else:
            aside = folder.with_name(f"{key}.tmp")
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
            _write(aside / "documents.arrow", records, bad_records)
            (aside / "bad_records.json").write_text(
                json.dumps({"counts": bad_records.counts, "named": bad_records.named})
            )
            aside.rename(folder)
    return TableSource(folder / "documents.arrow")


def _write(path: Path, records: Iterable[Record], bad_records: BadRecords) -> None:
    documents: list[bytes] = []
    num_bytes = 0
    with pa.ipc.new_file(str(path), _SCHEMA) as writer:
        for record in records:
            if isinstance(record, BadRecord):
                bad_records.add(record)
                continue
            documents.append(record)
            num_bytes += len(record)
            if num_bytes >= _BATCH_BYTES or len(documents) == _BATCH_DOCUMENTS:
                writer.write_batch(_batch(documents))
                documents, num_bytes = [], 0
        if documents:
            writer.write_batch(_batch(documents))


def _batch(documents: list[bytes]) -> pa.RecordBatch:
    columns = [documents, [len(document) for document in documents], [digest(document) for document in documents]]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.record_batch(arrays, _SCHEMA)


def _recall(path: Path, bad_records: BadRecords) -> None:
    saved = json.loads(path.read_text())
    for record in saved["named"]:
        bad_records.add(BadRecord(*record))
    bad_records.counts.update({kind: count - bad_records.counts[kind] for kind, count in saved["counts"].items()})


def _join(columns: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(columns) if columns else np.zeros(0, dtype=np.int64)
