"""Local files as a source of documents: txt, jsonl, parquet, raw bytes.

The documents are read once, checked, and written to a table that is mapped into memory: a source may be larger than
memory, every rank and worker shares it, and a document is read by number. Nothing leaves the machine.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from typing import IO, TypeVar

import pyarrow as pa

from spider_titan.data.config import SourceConfig
from spider_titan.data.document_cache import TableSource, open_cached
from spider_titan.data.documents import Settings
from spider_titan.data.parquet_blocks import BlockSource, ParquetFiles
from spider_titan.data.problems import BadRecords, SourceError
from spider_titan.data.records import COMPRESSIONS, FORMAT_OF_SUFFIX, Record, format_of, read_records

T = TypeVar("T")

_CACHE_VERSION = 1
"""Part of a table's name: another version has another layout, or other rules for what a document is."""


def open_files(name: str, config: SourceConfig, bad_records: BadRecords) -> TableSource:
    """Opens the files of a source, sorted by path; reads them only if the cache does not have them as they are now.

    Args:
        name: The source's name in ``[data.sources]``, for errors.
        config: Its configuration, of kind ``files``.
        bad_records: Is told of records that hold no document.

    Raises:
        ValueError: If a glob matches no file, or the format of a file is not known; names it.
        SourceError: At the first bad record, if bad records are to stop the run.
    """
    files = find_files(name, config)
    stats = [os.stat(path) for path, _ in files]
    # A file that changed is read again.
    stamps = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
    content = json.dumps([_CACHE_VERSION, files, stamps, config.text_field])
    key = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
    return open_cached(key, all_records(files, config.text_field), bad_records)


def open_in_place(name: str, config: SourceConfig, settings: Settings, bad_records: BadRecords) -> BlockSource:
    """Opens parquet files to be read where they are.

    Raises:
        ValueError: If a glob matches no file, or a file is not parquet; names it.
    """
    files = find_files(name, config)
    others = [path for path, file_format in files if file_format != "parquet"]
    if others:
        raise ValueError(f"data.sources.{name}: in_place is for parquet files, and {others[0]} is none; remove it")

    def attempt(action: Callable[[], T]) -> T:
        try:
            return action()
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"data.sources.{name}: its files cannot be read: {error}") from error

    paths = [path for path, _ in files]
    parquet = ParquetFiles(paths, config.text_field, _open, attempt)
    return BlockSource(name, parquet, settings, bad_records, origin="local files")


def find_files(name: str, config: SourceConfig) -> list[tuple[str, str]]:
    """The files of a source, sorted by path, each with its format.

    Raises:
        ValueError: As ``open_files``.
    """
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
    return [(path, _format_of(name, config, path)) for path in sorted(found)]


def all_records(files: list[tuple[str, str]], field: str) -> Iterator[Record]:
    """Yields the records of all files, one after the other."""
    for path, file_format in files:
        yield from read_records(path, file_format, field)


def _open(path: str) -> IO[bytes]:
    return open(path, "rb")


def _format_of(name: str, config: SourceConfig, path: str) -> str:
    file_format = config.format or format_of(path)
    if file_format is None:
        known = ", ".join(FORMAT_OF_SUFFIX)
        compressed = " or ".join(COMPRESSIONS)
        raise ValueError(
            f"data.sources.{name}: the suffix of {path} is none of {known}, nor one of these with {compressed}; "
            f"set format of this source"
        )
    return file_format
