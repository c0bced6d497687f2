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
    """Reads the row that a shard has at a step, from the source that the plan says.

    A document that is longer than a row goes on in the next row that its shard makes of its source.

    Args:
        sources: At least those that the phases give a weight.
        curriculum: Step -> phase.
        seq_len: L.
        num_shards: Virtual shards, which is the rows of a step over all ranks.
        seed: ``training.seed``.
        cursors: Where streams go on; those that have none begin.
    """

    def __init__(
        self,
        sources: Mapping[str, TrainingSource],
        curriculum: Curriculum,
        *,
        seq_len: int,
        num_shards: int,
        seed: int,
        cursors: Cursors | None = None,
    ) -> None:
        self._sources = sources
        self._seq_len = seq_len
        self._plan = RowPlan(curriculum, num_shards=num_shards, seed=seed)
        self._seed = seed
        self._cursors = cursors or {}
        self._streams: dict[int, dict[str, Stream]] = {}
        """Shard -> source -> stream."""

    def read(self, step: int, shards: Sequence[int]) -> Ids:
        """Returns the rows [len(shards), L + 1] that ``shards`` have at ``step``.

        Every step of a shard must be read, in order; shards do not depend on each other.
        """
        sources = self._plan.sources_at(step, shards)
        rows = np.empty((len(shards), self._seq_len + 1), dtype=np.int16)
        for row, shard, source in zip(rows, shards, sources, strict=True):
            row[:] = self._stream(source, shard).next_row()
        return rows

    def cursors(self, shards: Sequence[int]) -> Cursors:
        """The cursors of ``shards`` in the sources they have read, and of those they were given."""
        found: Cursors = {}
        for source, given in self._cursors.items():
            found[source] = {shard: given[shard] for shard in shards if shard in given}
        for shard in shards:
            for source, stream in self._streams.get(shard, {}).items():
                if cursor := stream.cursor:
                    found.setdefault(source, {})[shard] = cursor
        return {source: found[source] for source in sorted(found) if found[source]}

    def _stream(self, source: str, shard: int) -> Stream:
        streams = self._streams.setdefault(shard, {})
        if source not in streams:
            cursor = self._cursors.get(source, {}).get(shard)
            documents = self._encoded(self._sources[source], shard, cursor.position if cursor else None)
            streams[source] = Stream(source, documents, seq_len=self._seq_len, cursor=cursor)
        return streams[source]

    def _encoded(self, source: TrainingSource, shard: int, start: Position | None) -> Iterator[tuple[Position, Ids]]:
        documents = source.documents(shard, num_shards=self._plan.num_shards, seed=self._seed, start=start)
        for position, document in documents:
            yield position, encode_document(document, source.settings)


def encode_document(document: bytes, settings: Settings) -> Ids:
    """The ids of a document of a source, cut and marked as its settings say."""
    if settings.max_document_bytes:
        document = cut_at_character_boundary(document, settings.max_document_bytes)
    return encode(document, settings.markers)


def epochs(sources: Mapping[str, TrainingSource], cursors: Cursors) -> dict[str, int]:
    """How often the shard that is furthest has read all of its part of a source, for every source that was read."""
    return {
        name: max(sources[name].epoch(cursor.position) for cursor in of_shards.values())
        for name, of_shards in cursors.items()
        if of_shards
    }
