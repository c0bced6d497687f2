"""Rows of virtual shards: the same ones however many ranks read them.

Every shard has a stream of its own of every source: the documents at its positions of the source's order, back to back.
A row is a piece of one such stream. A rank reads the rows of the shards it owns, and needs nothing of the others.

L: positions of a row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from spider_titan.curriculum import Curriculum
from spider_titan.data.mixture import RowPlan
from spider_titan.data.order import DocumentOrder
from spider_titan.data.packing import RowPacker
from spider_titan.data.sources import SplitSource
from spider_titan.data.tokenizer import Ids, cut_at_character_boundary, encode


class Cursor(NamedTuple):
    """Where a stream goes on.

    Args:
        position: In the order of its source, of the document that holds the first id of the next row.
        offset: Ids of that document before it.
    """

    position: int
    offset: int


Cursors = dict[str, dict[int, Cursor]]
"""Source -> shard -> cursor. Those of all shards are the whole position of a run in its data."""


class Stream:
    """The documents of one shard of one source, cut into rows.

    Args:
        source: Its name, for errors.
        read: Position -> ids of the document there.
        stride: From one position of the shard to its next.
        seq_len: L.
        cursor: Where to begin. Documents before it are not read.
    """

    def __init__(self, source: str, read: Callable[[int], Ids], *, stride: int, seq_len: int, cursor: Cursor) -> None:
        self._source, self._read, self._stride, self._seq_len = source, read, stride, seq_len
        self._next, self._offset = cursor
        self._packer = RowPacker(seq_len)
        self._waiting: deque[tuple[int, int]] = deque()
        """Position and size of every document of which ids wait."""

    @property
    def cursor(self) -> Cursor:
        """Where the next row begins."""
        return Cursor(self._waiting[0][0] if self._waiting else self._next, self._offset)

    def next_row(self) -> Ids:
        """Returns ids [L + 1]; a row begins with the last id of the one before."""
        while not self._packer.is_ready:
            ids = self._read(self._next)
            if not self._waiting and self._offset >= ids.size:
                raise ValueError(
                    f"data.sources.{self._source}: the document to go on in has {ids.size:,} ids, of which "
                    f"{self._offset:,} were read: its documents are not those that the checkpoint was made with"
                )
            # Only the first document after a resume has ids that were rows already.
            self._packer.add(ids if self._waiting else ids[self._offset :])
            self._waiting.append((self._next, ids.size))
            self._next += self._stride
        self._offset += self._seq_len
        while self._offset >= self._waiting[0][1]:
            self._offset -= self._waiting.popleft()[1]
        return self._packer.take()


class RowReader:
    """Reads the row that a shard has at a step, from the source that the plan says.

    A document that is longer than a row goes on in the next row that its shard makes of its source.

    Args:
        sources: At least those that the phases give a weight.
        curriculum: Step -> phase.
        seq_len: L.
        num_shards: Virtual shards, which is the rows of a step over all ranks.
        seed: ``training.seed``.
        max_document_bytes: Longer documents are cut to this; 0: never.
        cursors: Where streams go on; those that have none begin.
    """

    def __init__(
        self,
        sources: Mapping[str, SplitSource],
        curriculum: Curriculum,
        *,
        seq_len: int,
        num_shards: int,
        seed: int,
        max_document_bytes: int = 0,
        cursors: Cursors | None = None,
    ) -> None:
        self._sources = sources
        self._seq_len = seq_len
        self._max_document_bytes = max_document_bytes
        self._plan = RowPlan(curriculum, num_shards=num_shards, seed=seed)
        self._orders = {
            name: DocumentOrder(len(source.train), seed=seed, source=name) for name, source in sources.items()
        }
        self._cursors = cursors or {}
        self._streams: dict[tuple[str, int], Stream] = {}

    def read(self, step: int, shards: Sequence[int]) -> Ids:
        """Returns the rows [len(shards), L + 1] that ``shards`` have at ``step``.

        Every step of a shard must be read, in order; shards do not depend on each other.
        """
        sources = self._plan.sources_at(step, shards)
        return np.stack([self._stream(source, shard).next_row() for shard, source in zip(shards, sources, strict=True)])

    def cursors(self, shards: Sequence[int]) -> Cursors:
        """The cursors of ``shards`` in the sources they have read, and of those they were given."""
        wanted = set(shards)
        found: Cursors = {
            source: {shard: cursor for shard, cursor in given.items() if shard in wanted}
            for source, given in self._cursors.items()
        }
        for (source, shard), stream in self._streams.items():
            if shard in wanted:
                found.setdefault(source, {})[shard] = stream.cursor
        return {source: found[source] for source in sorted(found) if found[source]}

    def _stream(self, source: str, shard: int) -> Stream:
        if (source, shard) not in self._streams:
            self._streams[source, shard] = Stream(
                source,
                lambda position: self._document(source, position),
                stride=self._plan.num_shards,
                seq_len=self._seq_len,
                cursor=self._cursors.get(source, {}).get(shard, Cursor(shard, 0)),
            )
        return self._streams[source, shard]

    def _document(self, source: str, position: int) -> Ids:
        document = self._sources[source].train_document(self._orders[source].at(position))
        if self._max_document_bytes:
            document = cut_at_character_boundary(document, self._max_document_bytes)
        return encode(document)
