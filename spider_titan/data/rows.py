"""Rows of virtual shards: the same ones however many ranks read them.

Every shard has a stream of its own of every source: the documents at its positions of the source's order, back to back.
A row is a piece of one such stream. A rank reads the rows of the shards it owns, and needs nothing of the others.

L: positions of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from spider_titan.curriculum import Curriculum
from spider_titan.data.mixture import RowPlan
from spider_titan.data.order import DocumentOrder
from spider_titan.data.packing import RowPacker
from spider_titan.data.sources import SplitSource
from spider_titan.data.tokenizer import Ids, cut_at_character_boundary, encode


class RowReader:
    """Reads the row that a shard has at a step, from the source that the plan says.

    A document that is longer than a row goes on in the next row that its shard makes of its source. The state is where
    each stream that was read is in the order of its source, and the ids that wait in its packer.

    Args:
        sources: At least those that the phases give a weight.
        curriculum: Step -> phase.
        seq_len: L.
        num_shards: Virtual shards, which is the rows of a step over all ranks.
        seed: ``training.seed``.
        max_document_bytes: Longer documents are cut to this; 0: never.
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
    ) -> None:
        self._sources = sources
        self._seq_len = seq_len
        self._max_document_bytes = max_document_bytes
        self._plan = RowPlan(curriculum, num_shards=num_shards, seed=seed)
        self._orders = {
            name: DocumentOrder(len(source.train), seed=seed, source=name) for name, source in sources.items()
        }
        self.positions: dict[tuple[int, str], int] = {}
        """(shard, source) -> position of its next document in the source's order."""
        self.packers: dict[tuple[int, str], RowPacker] = {}
        """(shard, source) -> what waits of the documents before that position."""

    def read(self, step: int, shards: Sequence[int]) -> Ids:
        """Returns the rows [len(shards), L + 1] that ``shards`` have at ``step``.

        Every step of a shard must be read, in order; shards do not depend on each other.
        """
        sources = self._plan.sources_at(step, shards)
        return np.stack([self._next_row(shard, source) for shard, source in zip(shards, sources, strict=True)])

    def _next_row(self, shard: int, source: str) -> Ids:
        stream = shard, source
        if stream not in self.packers:
            self.packers[stream] = RowPacker(self._seq_len)
            self.positions[stream] = shard
        packer = self.packers[stream]
        while not packer.is_ready:
            packer.add(self._document(source, self.positions[stream]))
            self.positions[stream] += self._plan.num_shards
        return packer.take()

    def _document(self, source: str, position: int) -> Ids:
        document = self._sources[source].train_document(self._orders[source].at(position))
        if self._max_document_bytes:
            document = cut_at_character_boundary(document, self._max_document_bytes)
        return encode(document)
