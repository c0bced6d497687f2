"""Files -> documents: what a record is in each format, and what is wrong with those that hold none.

A document keeps its bytes: no line end, byte order mark or NUL inside one is touched. The readers go through a file
once, from its beginning, and keep one record (of parquet, one batch) in memory.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

FORMAT_OF_SUFFIX = {".txt": "txt", ".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
"""Suffix, after that of a compression, -> format."""

COMPRESSIONS = (".gz", ".zst")

_BATCH_RECORDS = 256

_READ_ERRORS = (OSError, EOFError, zlib.error)
"""What files that are broken or cut off raise, compressed ones too."""


class BadRecord(NamedTuple):
    """A record, or a file, that holds no document.

    Args:
        kind: One of a few words to count by, such as ``empty document``.
        place: File, and line or record number where it has one.
        detail: What is wrong with it.
    """

    kind: str
    place: str
    detail: str

    def __str__(self) -> str:
        return f"{self.place} {self.detail}"


Record = bytes | BadRecord


def format_of(path: str) -> str | None:
    """The format that the suffix of ``path`` stands for; None if it is not known."""
    return FORMAT_OF_SUFFIX.get(Path(_without_compression(path)).suffix.lower())


def read_records(path: str, file_format: str, field: str) -> Iterator[Record]:
    """Yields what the records of a file hold, in order. A file that breaks off ends with a ``BadRecord``.

    Args:
        path: Of the file; ``.gz`` and ``.zst`` are unpacked, unless the format is ``bytes``.
        file_format: ``txt`` or ``bytes``: the file is a document. ``jsonl``, ``parquet``: a record is a document.
        field: That holds the document, of jsonl and parquet.
    """
    try:
        if file_format == "bytes":
            yield check_document(Path(path).read_bytes(), path)
        elif file_format == "txt":
            with open_unpacked(path) as file:
                yield check_document(file.read(), path)
        elif file_format == "jsonl":
            with open_unpacked(path) as file:
                yield from read_jsonl(file, path, field)
        else:
            with open(path, "rb") as file:
                yield from read_parquet(file, path, field)
    except _READ_ERRORS as error:
        yield BadRecord("unreadable file", path, f"cannot be read to its end: {error}")


def open_unpacked(path: str) -> IO[bytes]:
    """Opens a file for reading, through the decompression that its suffix asks for."""
    if path.lower().endswith(".gz"):
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.lower().endswith(".zst"):
        return io.BufferedReader(pa.input_stream(path, compression="zstd"))
    return open(path, "rb")


def check_document(document: bytes, place: str) -> Record:
    """The document, unless it is empty."""
    return document if document else BadRecord("empty document", place, "is empty")


def read_jsonl(file: IO[bytes], path: str, field: str) -> Iterator[Record]:
    """Yields what the lines of a file hold; empty lines are no records."""
    for number, line in enumerate(file, start=1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            yield _document_of_line(line, f"{path}, line {number}", field)


def _document_of_line(line: bytes, place: str, field: str) -> Record:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRecord("not UTF-8", place, f"is not UTF-8: {error}")
    except (ValueError, RecursionError) as error:
        return BadRecord("not JSON", place, f"is not JSON: {error}")
    if not isinstance(record, dict):
        return BadRecord("not an object", place, f"holds no object but a {type(record).__name__}")
    if field not in record:
        return BadRecord("missing field", place, _no_field(field, list(record)))
    text = record[field]
    if not isinstance(text, str):
        return BadRecord("wrong type", place, f"has no text but a {type(text).__name__} in the field '{field}'")
    # JSON can name half a surrogate pair, which UTF-8 cannot hold; its three bytes are kept all the same.
    return check_document(text.encode("utf-8", errors="surrogatepass"), place)


def read_parquet(file: IO[bytes], path: str, field: str) -> Iterator[Record]:
    """Yields what the records of a parquet file hold."""
    try:
        with pq.ParquetFile(file) as parquet:
            first = 0
            for group in range(parquet.num_row_groups):
                yield from read_row_group(parquet, group, path, field, first)
                first += parquet.metadata.row_group(group).num_rows
    except pa.ArrowException as error:
        yield BadRecord("unreadable file", path, f"cannot be read as parquet: {error}")


def read_row_group(parquet: pq.ParquetFile, group: int, path: str, field: str, first: int) -> Iterator[Record]:
    """Yields what the records of a row group hold.

    Args:
        parquet: An open file.
        group: Number of the row group, from 0.
        path: Of the file, for places.
        field: That holds the document: text or raw bytes; ``a.b`` is the field b of the struct a.
        first: Number of the group's first record in the file.
    """
    schema = parquet.schema_arrow
    name, *inner = [field] if field in schema.names else field.split(".")
    if name not in schema.names:
        yield BadRecord("missing field", f"{path}, row group {group}", _no_field(field, schema.names))
        return
    number = first
    # The reader's own threads would not outlive the fork of a worker process.
    for batch in parquet.iter_batches(_BATCH_RECORDS, row_groups=[group], columns=[field], use_threads=False):
        column = batch.column(0)
        for key in inner:
            column = pc.struct_field(column, key)
        if not _holds_bytes(column.type):
            detail = f"has neither text nor bytes but {column.type} in the field '{field}'"
            yield BadRecord("wrong type", f"{path}, row group {group}", detail)
            return
        # As bytes, so that nothing decodes a column of text and stumbles over what is not UTF-8.
        for document in column.cast(pa.large_binary()).to_pylist():
            place = f"{path}, record {number}"
            number += 1
            if document is None:
                yield BadRecord("missing field", place, f"has null in the field '{field}'")
            else:
                yield check_document(document, place)


def _holds_bytes(kind: pa.DataType) -> bool:
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests)


def _without_compression(path: str) -> str:
    return next((path[: -len(suffix)] for suffix in COMPRESSIONS if path.lower().endswith(suffix)), path)


def _no_field(field: str, fields: list[str]) -> str:
    there = ", ".join(f"'{name}'" for name in fields) or "none"
    return f"has no field '{field}'; there are: {there}. Set text_field to the one that holds the document"
