"""A set of parquet files as a source, read block by block: nothing is copied, and nothing is counted beforehand.

For files that are far away or many. A *block* is a row group; it is read whole, and its records are permuted. A *unit*
is a block, or a slice of the records of one where there are too few blocks for all shards. Every unit belongs to one
shard. In each epoch a shard goes through the files in an order of its own, in each file through its units in an order
of their own, and in each unit through its records in the order of the permuted block. All orders depend on the seed,
the epoch and the source's name alone, so a shard can begin anywhere, and reads nothing of what is before.

The order is less mixed than a permutation of all documents: neighbours in a shard are of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import IO, NamedTuple, Protocol, TypeVar

import pyarrow.parquet as pq

from spider_titan.data.documents import Position, Settings, digest
from spider_titan.data.order import permutation
from spider_titan.data.problems import BadRecords, EndOfData, SourceError, changed
from spider_titan.data.records import BadRecord, Record, read_row_group

K = TypeVar("K")
T = TypeVar("T")
V = TypeVar("V")

_UNITS_PER_SHARD = 4
"""With fewer units the shards' parts of an epoch would be too unequal."""

_KEPT_BLOCKS = 4
"""Decoded blocks that are kept for the shards that share them."""

_KEPT_FOOTERS = 64
"""Footers that are kept: each can take megabytes, and every shard is in another file."""


class Place(NamedTuple):
    """Where a document is in what a shard reads.

    Args:
        epoch: From 0.
        file: Place in the shard's order of files.
        unit: Place in its order of the file's units.
        record: Place in the unit's records.
    """

    epoch: int
    file: int
    unit: int
    record: int


class Attempt(Protocol):
    """Calls what it is given, again if that failed in a way that may pass."""

    def __call__(self, action: Callable[[], T]) -> T:
        """Returns what ``action`` returns.

        Raises:
            SourceError: If it goes on failing.
        """
        ...


class ParquetFiles(NamedTuple):
    """Which files there are, and how to read them.

    Args:
        paths: In an order that stays.
        field: That holds the document.
        open: Opens a path for reading.
        attempt: Around every reading.
    """

    paths: Sequence[str]
    field: str
    open: Callable[[str], IO[bytes]]
    attempt: Attempt


class BlockSource:
    """Documents of parquet files, in the order that the module's docstring tells.

    Args:
        name: Its name in ``[data.sources]``.
        files: At least one.
        settings: The held-out share and the rest.
        bad_records: Is told of records that hold no document, each time they are read.
        origin: What the files are, for the start-up.
    """

    def __init__(
        self, name: str, files: ParquetFiles, settings: Settings, bad_records: BadRecords, *, origin: str
    ) -> None:
        self.name = name
        self.settings = settings
        self._files = files
        self._bad_records = bad_records
        self._origin = origin
        self._rows: dict[str, list[int]] = {}
        """Path -> records of every block, of all files that were met."""
        self._footers: dict[str, pq.FileMetaData] = {}
        self._blocks: dict[tuple[str, int], list[Record]] = {}
        self._slices: dict[int, int] = {}

    def documents(
        self, shard: int, *, num_shards: int, seed: int, start: Position | None = None
    ) -> Iterator[tuple[tuple[int, ...], bytes]]:
        """As ``TrainingSource``; positions are a ``Place``.

        Raises:
            SourceError: If the files cannot be read, or a shard has no document in a whole epoch.
        """
        place = self._place(start) if start is not None else Place(0, 0, 0, 0)
        while True:
            num_documents = 0
            for position, document in self._epoch(shard, num_shards, seed, place):
                num_documents += 1
                yield position, document
            if not self.settings.repeat:
                raise EndOfData(self.name)
            if not num_documents and place == Place(place.epoch, 0, 0, 0):
                raise SourceError(
                    f"data.sources.{self.name} has too few documents for {num_shards} shards: one of them would never "
                    f"have any. Give it more, or lower training.global_batch_size or its interleave"
                )
            place = Place(place.epoch + 1, 0, 0, 0)

    def held_out_documents(self, seed: int) -> Iterator[bytes]:
        """As ``TrainingSource``: file by file, each from its beginning, as far as they are asked for."""
        if not self.settings.held_out_fraction:
            return
        for number in permutation(len(self._files.paths), f"{seed}/0/{self.name}/held out"):
            path = self._files.paths[number]
            for group in range(len(self._rows_of(path))):
                for record in self._block(path, group):
                    if isinstance(record, bytes) and self._is_held_out(record):
                        yield record

    def epoch(self, position: Position) -> int:
        """As ``TrainingSource``."""
        return self._place(position).epoch

    def _place(self, position: Position) -> Place:
        place = None if isinstance(position, int) or len(position) != len(Place._fields) else Place(*position)
        if place is None or place.file >= len(self._files.paths):
            raise SourceError(changed(self.name))
        return place

    def describe(self) -> str:
        """What the files are, and how many; documents are counted by no one."""
        return f"{self.name}: {self._origin}, {len(self._files.paths):,} parquet files, read block by block"

    def _epoch(self, shard: int, num_shards: int, seed: int, start: Place) -> Iterator[tuple[Place, bytes]]:
        """The training documents of a shard from ``start`` to the end of its epoch."""
        key = f"{seed}/{start.epoch}/{self.name}"
        slices = self._num_slices(num_shards)
        files = permutation(len(self._files.paths), f"{key}/{shard}")
        for file in range(start.file, len(files)):
            number = int(files[file])
            path = self._files.paths[number]
            # Numbered from the file's own number on, so that files of few blocks do not all go to the same shards.
            num_units = len(self._rows_of(path)) * slices
            units = range((shard - number) % num_shards, num_units, num_shards)
            order = permutation(len(units), f"{key}/{shard}/{number}")
            for unit in range(start.unit if file == start.file else 0, len(units)):
                group, part = divmod(units[order[unit]], slices)
                block = self._block(path, group)
                records = permutation(len(block), f"{key}/{number}/{group}")[part::slices]
                is_first = (file, unit) == (start.file, start.unit)
                for record in range(start.record if is_first else 0, len(records)):
                    document = block[records[record]]
                    if isinstance(document, BadRecord):
                        self._bad_records.add(document)
                    elif not self._is_held_out(document):
                        yield Place(start.epoch, file, unit, record), document

    def _is_held_out(self, document: bytes) -> bool:
        return digest(document) < self.settings.held_out_below

    def _num_slices(self, num_shards: int) -> int:
        """Into how many slices a block is divided, so that every shard has some units."""
        if num_shards not in self._slices:
            needed, found = _UNITS_PER_SHARD * num_shards, 0
            for path in self._files.paths:
                found += sum(rows > 0 for rows in self._rows_of(path))
                if found >= needed:
                    break
            if not found:
                raise SourceError(f"data.sources.{self.name}: there is no record in its {len(self._files.paths)} files")
            self._slices[num_shards] = -(-needed // min(found, needed))
        return self._slices[num_shards]

    def _rows_of(self, path: str) -> list[int]:
        if path not in self._rows:
            footer = self._footer(path)
            self._rows[path] = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        return self._rows[path]

    def _footer(self, path: str) -> pq.FileMetaData:
        if path not in self._footers:

            def read() -> pq.FileMetaData:
                with self._files.open(path) as file:
                    return pq.read_metadata(file)

            _keep(self._footers, path, self._files.attempt(read), _KEPT_FOOTERS)
        return self._footers[path]

    def _block(self, path: str, group: int) -> list[Record]:
        if (path, group) not in self._blocks:
            footer, first = self._footer(path), sum(self._rows_of(path)[:group])

            def read() -> list[Record]:
                with self._files.open(path) as file, pq.ParquetFile(file, metadata=footer) as parquet:
                    return list(read_row_group(parquet, group, path, self._files.field, first))

            _keep(self._blocks, (path, group), self._files.attempt(read), _KEPT_BLOCKS)
        return self._blocks[path, group]


def _keep(kept: dict[K, V], key: K, value: V, limit: int) -> None:
    """Adds to what is kept; beyond ``limit`` the oldest goes."""
    if len(kept) >= limit:
        del kept[next(iter(kept))]
    kept[key] = value
