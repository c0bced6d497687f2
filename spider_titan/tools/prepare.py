"""Copies a source of a configuration to local parquet files, once, so that runs need no hub.

``python -m spider_titan.tools.prepare --config train_configs/spider_10b.toml --source english --out corpora/english``

The files hold one column, ``text``, with the bytes of a document, in small row groups, so that they can be read in
place. Each is made aside and appears whole: the same command goes on where it was stopped.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple, cast
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from tqdm import tqdm

from spider_titan.config import load_config
from spider_titan.console import setup_console
from spider_titan.data.config import DataConfig, SourceConfig
from spider_titan.data.files import all_records, find_files
from spider_titan.data.problems import BadRecords, SourceError
from spider_titan.data.records import BadRecord, Record, format_of, read_records, read_row_group

logger = logging.getLogger("spider_titan.tools.prepare")

_SCHEMA = pa.schema([("text", pa.large_binary())])

_GROUP_BYTES = 2**22
_GROUP_DOCUMENTS = 2048
"""A row group ends at the first of the two."""


@dataclass(frozen=True)
class PrepareConfig:
    """Copies a source to local parquet files."""

    source: str
    """Name of the source in [data.sources]; of kind files or hub."""
    out: Path
    """Folder for the parquet files."""
    config: Path
    """TOML file that has the source."""
    part_bytes: int = 2**28
    """Local files are copied to parts of about this size; a file of a hub dataset is a part."""


class Part(NamedTuple):
    """What one parquet file is made of.

    Args:
        origin: Names of the files it is made of.
        read: Their records.
    """

    origin: list[str]
    read: Callable[[], Iterator[Record]]


def main(arguments: list[str]) -> int:
    """Copies what the command line asks for; returns the exit status."""
    setup_console(rank=0)
    try:
        prepare(tyro.cli(PrepareConfig, args=arguments, prog="python -m spider_titan.tools.prepare"))
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 2
    return 0


def prepare(config: PrepareConfig) -> None:
    """Copies a source, or what is missing of the copy.

    Raises:
        ValueError: If there is no such source, it cannot be read, or the folder holds a copy of something else.
    """
    data = load_config(["--job.config_file", str(config.config)]).data
    if config.source not in data.sources:
        raise ValueError(f"--source {config.source}: {config.config} has {', '.join(sorted(data.sources))}")
    parts = list_parts(config.source, data, config.part_bytes)
    config.out.mkdir(parents=True, exist_ok=True)
    _check_manifest(config.out / "manifest.json", [part.origin for part in parts])
    bad_records = BadRecords(config.source, data.on_bad_record)
    copied = 0
    for number, part in enumerate(tqdm(parts, unit="file", desc=config.source, disable=None)):
        path = config.out / f"{number:06}.parquet"
        if not path.exists():
            copied += _write(path, part.read(), bad_records)
    skipped = f"; skipped {bad_records.summary()}" if bad_records.counts else ""
    logger.info("%s: %s documents copied in this run%s", config.source, f"{copied:,}", skipped)
    logger.info('read it with path = "%s/*.parquet", and in_place = true if it is large', config.out)


def list_parts(name: str, data: DataConfig, part_bytes: int) -> list[Part]:
    """The parts of a copy of a source, in the order of its files.

    Raises:
        ValueError: If its files cannot be found, or it has none.
    """
    source = data.sources[name]
    if source.is_local:
        return [_local_part(files, source) for files in _grouped(find_files(name, source), part_bytes)]
    if source.kind == "hub":
        return _hub_parts(name, source, data.hub_retry_seconds)
    raise ValueError(f'data.sources.{name}: kind = "{source.kind}" is not copied; only files and hub are')


def _local_part(files: list[tuple[str, str]], source: SourceConfig) -> Part:
    return Part([path for path, _ in files], lambda: all_records(files, source.text_field))


def _grouped(files: list[tuple[str, str]], part_bytes: int) -> Iterator[list[tuple[str, str]]]:
    """Neighbouring files together, until they have ``part_bytes``."""
    group: list[tuple[str, str]] = []
    size = 0
    for file in files:
        group.append(file)
        size += os.path.getsize(file[0])
        if size >= part_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def _hub_parts(name: str, source: SourceConfig, retry_seconds: float) -> list[Part]:
    from spider_titan.data import hub

    retry = hub.Retry(name, retry_seconds)
    _, urls = retry(lambda: hub.list_files(name, source))
    return [Part([url], _read_url(name, url, source, retry)) for url in urls]


def _read_url(name: str, url: str, source: SourceConfig, retry: Callable) -> Callable[[], Iterator[Record]]:
    from spider_titan.data import hub

    def read_parquet() -> Iterator[Record]:
        with retry(lambda: pq.ParquetFile(cast(IO[bytes], hub.RangeFile(url)))) as parquet:
            first = 0
            for group in range(parquet.num_row_groups):
                yield from retry(lambda: list(read_row_group(parquet, group, url, source.text_field, first)))  # noqa: B023
                first += parquet.metadata.row_group(group).num_rows

    def read_other() -> Iterator[Record]:
        path = unquote(urlsplit(url).path)
        file_format = format_of(path)
        if file_format is None:
            raise SourceError(f"data.sources.{name}: the format of {url} is not known")
        with tempfile.TemporaryDirectory() as folder:
            local = os.path.join(folder, os.path.basename(path))
            retry(lambda: hub.download(url, local))
            yield from read_records(local, file_format, source.text_field)

    return read_parquet if url.endswith(".parquet") else read_other


def _check_manifest(path: Path, origins: list[list[str]]) -> None:
    if path.exists():
        if json.loads(path.read_text()) != origins:
            raise ValueError(f"--out {path.parent} holds a copy of other files (see {path}); give another folder")
    else:
        path.write_text(json.dumps(origins))


def _write(path: Path, records: Iterable[Record], bad_records: BadRecords) -> int:
    """Writes the good records aside, then makes the file visible; returns how many there are."""
    aside = path.with_suffix(".tmp")
    count, waiting, num_bytes = 0, list[bytes](), 0
    with pq.ParquetWriter(aside, _SCHEMA, compression="zstd") as writer:
        for record in records:
            if isinstance(record, BadRecord):
                bad_records.add(record)
                continue
            waiting.append(record)
            num_bytes += len(record)
            if num_bytes >= _GROUP_BYTES or len(waiting) == _GROUP_DOCUMENTS:
                writer.write_table(pa.table([waiting], schema=_SCHEMA))
                count, waiting, num_bytes = count + len(waiting), [], 0
        if waiting:
            writer.write_table(pa.table([waiting], schema=_SCHEMA))
    aside.rename(path)
    return count + len(waiting)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
