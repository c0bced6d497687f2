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

    Shard v has rows at the place v % R, every ``interleave`` steps: so long documents do not make the steps that follow
    each other alike. A document that is longer than a row goes on in the next row that its shard makes of its source.

    Args:
        sources: At least those that the phases give a weight.
        curriculum: Step -> phase.
        seq_len: L.
        num_rows: R, rows of a step over all ranks.
        interleave: ``data.interleave``.
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
        interleave: int,
        seed: int,
        cursors: Cursors | None = None,
    ) -> None:
        self._sources = sources
        self._seq_len = seq_len
        self._plan = RowPlan(curriculum, num_rows=num_rows, seed=seed)
        self._num_rows, self._interleave = num_rows, interleave
        self._seed = seed
        self._cursors = cursors or {}
        self._streams: dict[int, dict[str, Stream]] = {}
        """Shard -> source -> stream."""

    def read(self, step: int, places: Sequence[int]) -> Ids:
        """Returns the rows [len(places), L + 1] that stand at ``places``, below R, of ``step``.

        Every step of a place must be read, in order; places do not depend on each other.
        """
        sources = self._plan.sources_at(step, places)
        ids = np.empty((len(places), self._seq_len + 1), dtype=np.int16)
        for row, shard, source in zip(ids, self._shards(step, places), sources, strict=True):
            row[:] = self._stream(source, shard).next_row()
        return ids

    def cursors(self, step: int, places: Sequence[int]) -> Cursors:
        """The cursors after ``step`` of the shards whose rows stand at ``places`` in it, in all sources."""
        shards = self._shards(step, places)
        found: Cursors = {}
        for source, given in self._cursors.items():
            found[source] = {shard: given[shard] for shard in shards if shard in given}
        for shard in shards:
            for source, stream in self._streams.get(shard, {}).items():
                if cursor := stream.cursor:
                    found.setdefault(source, {})[shard] = cursor
        return {source: found[source] for source in sorted(found) if found[source]}

    def _shards(self, step: int, places: Sequence[int]) -> list[int]:
        """A place goes through its shards in turn, a step each."""
        turn = step % self._interleave
        return [place + self._num_rows * turn for place in places]

    def _stream(self, source: str, shard: int) -> Stream:
        streams = self._streams.setdefault(shard, {})
        if source not in streams:
            cursor = self._cursors.get(source, {}).get(shard)
            documents = self._encoded(self._sources[source], shard, cursor.position if cursor else None)
            streams[source] = Stream(source, documents, seq_len=self._seq_len, cursor=cursor)
        return streams[source]

    def _encoded(self, source: TrainingSource, shard: int, start: Position | None) -> Iterator[tuple[Position, Ids]]:
        num_shards = self._num_rows * self._interleave
        documents = source.documents(shard, num_shards=num_shards, seed=self._seed, start=start)
        for position, document in documents:
            yield position, encode_document(document, source.settings)


def encode_document(document: bytes, settings: Settings) -> Ids:
    """The ids of a document of a source, cut and marked as its settings say."""
    if settings.max_document_bytes:
        document = cut_at_character_boundary(document, settings.max_document_bytes)
    return encode(document, settings.markers)


def epochs(sources: Mapping[str, TrainingSource], cursors: Cursors) -> dict[str, int]:
    """How often each shard that has begun a source has read all its part of it; 0 for a source that none has begun."""
    return {
        name: min((source.epoch(cursor.position) for cursor in cursors.get(name, {}).values()), default=0)
        for name, source in sources.items()
    }
