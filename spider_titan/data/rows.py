"""Rows of virtual shards: the same ones however many ranks read them.

Every shard has a stream of its own of every source: the documents at its positions of the source's order, back to back.
A row is a piece of one such stream. A rank reads the rows of the shards it owns, and needs nothing of the others.

L: positions of a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from spider_titan.curriculum import Curriculum
from spider_titan.data.documents import Position, Settings, TrainingSource
from spider_titan.data.mixture import RowPlan
from spider_titan.data.packing import RowPacker
from spider_titan.data.problems import SourceError, changed
from spider_titan.data.tokenizer import Ids, cut_at_character_boundary, encode


class Cursor(NamedTuple):
    """Where a stream goes on.

    Args:
        position: What its source calls the place of the document that holds the first id of the next row.
        offset: Ids of that document before it.
    """

    position: Position
    offset: int


Cursors = dict[str, dict[int, Cursor]]
"""Source -> shard -> cursor. Those of all shards are the whole position of a run in its data."""


class Stream:
    """The documents of one shard of one source, cut into rows.

    Args:
        source: Its name, for errors.
        documents: Positions and ids of the documents, from the one of the cursor on.
        seq_len: L.
        cursor: Where to begin; None: with the first id of the first document.
    """

    def __init__(
        self, source: str, documents: Iterator[tuple[Position, Ids]], *, seq_len: int, cursor: Cursor | None = None
    ) -> None:
        self._source, self._documents, self._seq_len = source, documents, seq_len
        self._start = cursor
        self._offset = cursor.offset if cursor else 0
        self._packer = RowPacker(seq_len)
        self._waiting: deque[tuple[Position, int]] = deque()
        """Position and size of every document of which ids wait."""

    @property
    def cursor(self) -> Cursor | None:
        """Where the next row begins; None: at the beginning."""
        return Cursor(self._waiting[0][0], self._offset) if self._waiting else self._start

    def next_row(self) -> Ids:
        """Returns ids [L + 1]; a row begins with the last id of the one before.

        Raises:
            EndOfData: If the documents end before the row does.
        """
        waiting, packer = self._waiting, self._packer
        while not packer.is_ready:
            position, ids = next(self._documents)
            if not waiting and self._offset >= ids.size:
                raise SourceError(changed(self._source))
            # Only the first document after a resume has ids that were rows already.
            packer.add(ids if waiting else ids[self._offset :])
            waiting.append((position, ids.size))
        self._offset += self._seq_len
        while self._offset >= waiting[0][1]:
            self._offset -= waiting.popleft()[1]
        return packer.take()


class RowReader:
    """Reads the rows of a step: at each place that of a shard, from the source that the plan says.

    A source has R times its ``interleave`` shards. Shard v has the place v % R, in every ``interleave``-th step: so
    long documents do not make the steps that follow each other alike. A document that is longer than a row goes on in
    the next row that its shard makes of its source.

    Args:
        sources: At least those that the phases give a weight.
        curriculum: Step -> phase.
        seq_len: L.
        num_rows: R, rows of a step over all ranks.
        seed: ``training.seed``.
        cursors: Where streams go on; those that have none begin.
    """

    def __init__(
        self,
        sources: Mapping[str, TrainingSource],
        curriculum: Curriculum,
        *,
        seq_len: int,
        num_rows: int,
        seed: int,
        cursors: Cursors | None = None,
    ) -> None:
        self._sources = sources
        self._seq_len = seq_len
        self._plan = RowPlan(curriculum, num_rows=num_rows, seed=seed)
        self._num_rows = num_rows
        self._seed = seed
        self._cursors = cursors or {}
        self._streams: dict[str, dict[int, Stream]] = {}
        """Source -> shard -> stream."""

    def read(self, step: int, places: Sequence[int]) -> Ids:
        """Returns the rows [len(places), L + 1] that stand at ``places``, below R, of ``step``.

        Every step of a place must be read, in order; places do not depend on each other.
        """
        sources = self._plan.sources_at(step, places)
        ids = np.empty((len(places), self._seq_len + 1), dtype=np.int16)
        for row, place, source in zip(ids, places, sources, strict=True):
            row[:] = self._stream(source, self._shard(source, step, place)).next_row()
        return ids

    def cursors(self, step: int, places: Sequence[int]) -> Cursors:
        """The cursors after ``step`` of the shards whose rows stand at ``places`` in it, in all sources."""
        found: Cursors = {}
        for source in sorted(self._sources):
            given, streams = self._cursors.get(source, {}), self._streams.get(source, {})
            of_shards = {}
            for shard in (self._shard(source, step, place) for place in places):
                cursor = streams[shard].cursor if shard in streams else given.get(shard)
                if cursor:
                    of_shards[shard] = cursor
            if of_shards:
                found[source] = of_shards
        return found

    def _shard(self, source: str, step: int, place: int) -> int:
        """A place goes through its shards of a source in turn, a step each."""
        return place + self._num_rows * (step % self._sources[source].settings.interleave)

    def _stream(self, source: str, shard: int) -> Stream:
        streams = self._streams.setdefault(source, {})
        if shard not in streams:
            cursor = self._cursors.get(source, {}).get(shard)
            documents = self._encoded(self._sources[source], shard, cursor.position if cursor else None)
            streams[shard] = Stream(source, documents, seq_len=self._seq_len, cursor=cursor)
        return streams[shard]

    def _encoded(self, source: TrainingSource, shard: int, start: Position | None) -> Iterator[tuple[Position, Ids]]:
        num_shards = len(shards(source, self._num_rows))
        documents = source.documents(shard, num_shards=num_shards, seed=self._seed, start=start)
        for position, document in documents:
            yield position, encode_document(document, source.settings)


def encode_document(document: bytes, settings: Settings) -> Ids:
    """The ids of a document of a source, cut and marked as its settings say."""
    if settings.max_document_bytes:
        document = cut_at_character_boundary(document, settings.max_document_bytes)
    return encode(document, settings.markers)


def shards(source: TrainingSource, num_rows: int, rank: int = 0, world_size: int = 1) -> range:
    """The shards of a source that a rank owns: those whose places are its own.

    Args:
        source: The source.
        num_rows: R, rows of a step over all ranks.
        rank: The rank.
        world_size: How many there are, a divisor of R.
    """
    return range(rank, num_rows * source.settings.interleave, world_size)


def epochs(source: TrainingSource, cursors: Mapping[int, Cursor], shards: Sequence[int]) -> float:
    """How often a source was read: the mean over ``shards``, which may be some of those that have cursors."""
    return sum(source.epoch(cursors[shard].position) for shard in shards if shard in cursors) / len(shards)
