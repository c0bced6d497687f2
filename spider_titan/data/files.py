"""Local files as a source of documents: txt, jsonl and parquet.

The documents are read once, checked, and written to the cache of HF ``datasets`` (``HF_DATASETS_CACHE``), which maps
them into memory: a source may be larger than memory, every rank and worker shares it, and a document is read by number.
The readers are our own: those of ``datasets`` turn CRLF to LF and take a column of dates for timestamps, and loading
through them asks the hub to count it. Here a document keeps its bytes, and nothing leaves the machine.
"""

from __future__ import annotations

import codecs
import glob
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.exceptions import DatasetGenerationError

from spider_titan.data.config import SourceConfig
from spider_titan.data.sources import digest

_FORMAT_OF_SUFFIX = {".txt": "txt", ".jsonl": "jsonl", ".parquet": "parquet"}

_FEATURES = datasets.Features(
    {
        "document": datasets.Value("large_binary"),
        "size": datasets.Value("int64"),
        "digest": datasets.Value("int64"),
    }
)


class FileSource:
    """Documents in a memory-mapped table.

    Args:
        table: With the columns ``document``, ``size`` and ``digest``.
    """

    def __init__(self, table: datasets.Dataset) -> None:
        self._table = table
        self.sizes = table.data.column("size").to_numpy()
        self.digests = table.data.column("digest").to_numpy()

    def __len__(self) -> int:
        return len(self._table)

    def document(self, index: int) -> bytes:
        """Document ``index``, from 0, exactly as stored."""
        return self._table.data.column("document")[index].as_py()


def open_files(name: str, config: SourceConfig) -> FileSource:
    """Opens the files of a source, sorted by path; reads them only if the cache does not have them as they are now.

    Args:
        name: The source's name in ``[data.sources]``, for errors.
        config: Its configuration, of kind ``files``.

    Raises:
        ValueError: If a glob matches no file, or a file or record cannot be read; names it.
    """
    files = [(path, _format_of(name, config, path)) for path in _find(name, config)]
    stats = [os.stat(path) for path, _ in files]
    # All of it goes into the name of the cached table: a file that changed is read again.
    arguments = {
        "files": files,
        "text_field": config.text_field,
        "stamps": [(stat.st_size, stat.st_mtime_ns) for stat in stats],
    }
    try:
        with _progress_bars_only_for_people():
            table = datasets.Dataset.from_generator(_records, features=_FEATURES, gen_kwargs=arguments)
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, ValueError | OSError):
            raise ValueError(f"data.sources.{name}: {error.__cause__}") from error
        raise
    return FileSource(table)


@contextmanager
def _progress_bars_only_for_people() -> Iterator[None]:
    """Switches the bars of ``datasets`` off while the output is not a terminal."""
    switch = not sys.stderr.isatty() and not datasets.are_progress_bars_disabled()
    if switch:
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if switch:
            datasets.enable_progress_bars()


def _find(name: str, config: SourceConfig) -> list[str]:
    found: set[str] = set()
    for pattern in config.globs:
        pattern = os.path.abspath(os.path.expanduser(pattern))
        # A file whose name has brackets in it is a file before it is a glob.
        matches = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
        files = [path for path in matches if os.path.isfile(path)]
        if not files:
            hint = f"; it is a folder: write {pattern}/*" if os.path.isdir(pattern) else ""
            raise ValueError(f"data.sources.{name}.path: no file matches {pattern}{hint}")
        found.update(files)
    return sorted(found)


def _format_of(name: str, config: SourceConfig, path: str) -> str:
    file_format = config.format or _FORMAT_OF_SUFFIX.get(Path(path).suffix.lower())
    if file_format is None:
        known = ", ".join(_FORMAT_OF_SUFFIX)
        raise ValueError(f"data.sources.{name}: the suffix of {path} is none of {known}; set format of this source")
    return file_format


def _records(files: list[tuple[str, str]], text_field: str, stamps: list[tuple[int, int]]) -> Iterator[dict[str, Any]]:
    """Yields the rows of the table."""
    del stamps  # part of the cache's key only
    for path, file_format in files:
        if file_format == "txt":
            documents = iter([Path(path).read_bytes()])
        elif file_format == "jsonl":
            documents = _read_jsonl(path, text_field)
        else:
            documents = _read_parquet(path, text_field)
        for document in documents:
            yield {"document": document, "size": len(document), "digest": digest(document)}


def _read_jsonl(path: str, text_field: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                record = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place} is not JSON in UTF-8: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{place} holds no object but a {type(record).__name__}")
            if text_field not in record:
                raise ValueError(_no_field(place, text_field, list(record)))
            text = record[text_field]
            if not isinstance(text, str):
                raise ValueError(f"{place}: the field '{text_field}' holds no text but a {type(text).__name__}")
            # JSON can name half a surrogate pair, which UTF-8 cannot hold; its three bytes are kept all the same.
            yield text.encode("utf-8", errors="surrogatepass")


def _read_parquet(path: str, text_field: str) -> Iterator[bytes]:
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            if text_field not in schema.names:
                raise ValueError(_no_field(path, text_field, schema.names))
            field_type = schema.field(text_field).type
            is_text = pa.types.is_string(field_type) or pa.types.is_large_string(field_type)
            if not is_text and not pa.types.is_binary(field_type) and not pa.types.is_large_binary(field_type):
                raise ValueError(f"{path}: the field '{text_field}' holds neither text nor bytes but {field_type}")
            number = 0
            for batch in file.iter_batches(columns=[text_field]):
                # As bytes, so that nothing decodes a column of text and stumbles over what is not UTF-8.
                for document in batch.column(0).cast(pa.large_binary()).to_pylist():
                    if document is None:
                        raise ValueError(f"{path}, record {number}: the field '{text_field}' is null")
                    number += 1
                    yield document
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as parquet: {error}") from error


def _no_field(place: str, text_field: str, fields: list[str]) -> str:
    there = ", ".join(f"'{field}'" for field in fields) or "none"
    return f"{place} has no field '{text_field}'; there are: {there}. Set text_field to the one that holds the document"
