"""Documents of a source, in training and held out.

A document is held out by a hash of its bytes: the same rule for every source, independent of names, order, ranks and
seeds. Two documents with the same bytes are on the same side, so nothing that is validated on was trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spider_titan.data.config import Markers
from spider_titan.data.order import DocumentOrder, permutation
from spider_titan.data.problems import BadRecords, EndOfData, SourceError, changed

Position = int | Sequence[int]
"""Where a document is in what a shard reads of a source, as JSON can keep it."""


class Source(Protocol):
    """Documents that can be read by number, in an order that does not change."""

    sizes: NDArray[np.int64]
    """Bytes of every document."""
    digests: NDArray[np.int64]
    """``digest`` of every document."""

    def __len__(self) -> int:
        """How many documents there are."""
        ...

    def document(self, index: int) -> bytes:
        """Document ``index``, from 0, exactly as stored."""
        ...


def digest(document: bytes) -> int:
    """A hash of the bytes, uniform in 0..2**63 - 1, for good the same."""
    return int.from_bytes(hashlib.blake2b(document, digest_size=8).digest(), "little") >> 1


class ListSource:
    """Documents in memory.

    Args:
        documents: All of them.
    """

    def __init__(self, documents: Sequence[bytes]) -> None:
        self._documents = documents
        self.sizes = np.array([len(document) for document in documents], dtype=np.int64)
        self.digests = np.array([digest(document) for document in documents], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._documents)

    def document(self, index: int) -> bytes:
        """Document ``index``, from 0."""
        return self._documents[index]


@dataclass(frozen=True)
class Settings:
    """What all kinds of sources are told.

    Args:
        held_out_fraction: Expected share of the documents that is held out.
        repeat: Whether epoch follows epoch.
        markers: Ids around the bytes of a document.
        max_document_bytes: Longer documents are cut to this; 0: never.
        interleave: Shards of the source that take turns at a row's place.
    """

    held_out_fraction: float
    repeat: bool = True
    markers: Markers | None = None
    max_document_bytes: int = 0
    interleave: int = 1

    @property
    def held_out_below(self) -> int:
        """Documents with a ``digest`` below this are held out."""
        return int(self.held_out_fraction * 2**63)


class TrainingSource(Protocol):
    """What the loader needs of a source."""

    name: str
    settings: Settings

    def documents(
        self, shard: int, *, num_shards: int, seed: int, start: Position | None = None
    ) -> Iterator[tuple[Position, bytes]]:
        """Yields the training documents of a shard with their positions, epoch after epoch.

        Args:
            shard: Which, below ``num_shards``. Shards share the documents of an epoch out among them.
            num_shards: How many there are.
            seed: Of the order.
            start: Position of the first one; None: the beginning.

        Raises:
            EndOfData: After the last one of a source that does not repeat.
        """
        ...

    def held_out_documents(self, seed: int) -> Iterator[bytes]:
        """Yields every held-out document once, in an order that depends on ``seed``."""
        ...

    def epoch(self, position: Position) -> int:
        """How often all documents were read before ``position``."""
        ...

    def describe(self) -> str:
        """What there is, in a line."""
        ...


class SplitSource:
    """Documents by number, divided into training and held-out ones, in an order that is permuted anew each epoch.

    Args:
        name: Its name in ``[data.sources]``.
        source: The documents.
        settings: The held-out share and the rest.
        bad_records: Those that were met when the documents were read.

    Raises:
        ValueError: If no document is left to train on.
    """

    def __init__(self, name: str, source: Source, settings: Settings, bad_records: BadRecords | None = None) -> None:
        self.name = name
        self.source = source
        self.settings = settings
        self._bad_records = bad_records
        is_held_out = source.digests < settings.held_out_below
        self.train = np.flatnonzero(~is_held_out)
        """Numbers of the training documents."""
        self.held_out = np.flatnonzero(is_held_out)
        """Numbers of the held-out documents."""
        self._orders: dict[int, DocumentOrder] = {}
        if not len(self.train):
            raise ValueError(self._explain_nothing())

    def train_document(self, index: int) -> bytes:
        """Training document ``index``, below ``len(self.train)``."""
        return self.source.document(int(self.train[index]))

    def held_out_document(self, index: int) -> bytes:
        """Held-out document ``index``, below ``len(self.held_out)``."""
        return self.source.document(int(self.held_out[index]))

    def documents(
        self, shard: int, *, num_shards: int, seed: int, start: Position | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """As ``TrainingSource``. A position is a place in the endless order of all epochs."""
        if seed not in self._orders:
            self._orders[seed] = DocumentOrder(len(self.train), seed=seed, source=self.name)
        order = self._orders[seed]
        position = shard if start is None else self._place(start)
        while self.settings.repeat or position < len(self.train):
            yield position, self.train_document(order.at(position))
            position += num_shards
        raise EndOfData(self.name)

    def held_out_documents(self, seed: int) -> Iterator[bytes]:
        """As ``TrainingSource``."""
        for index in permutation(len(self.held_out), f"{seed}/0/{self.name}"):
            yield self.held_out_document(int(index))

    def epoch(self, position: Position) -> int:
        """As ``TrainingSource``."""
        return self._place(position) // len(self.train)

    def describe(self) -> str:
        """Documents and bytes as stored, in training and held out; what is cut, what was skipped."""
        sizes, held_out_sizes = self.source.sizes[self.train], self.source.sizes[self.held_out]
        text = (
            f"{self.name}: {len(sizes):,} documents, {sizes.sum():,} bytes; "
            f"held out {len(held_out_sizes):,} documents, {held_out_sizes.sum():,} bytes"
        )
        limit = self.settings.max_document_bytes
        excess = np.maximum(sizes - limit, 0) if limit else np.zeros_like(sizes)
        if excess.any():
            text += f"; cut {np.count_nonzero(excess):,} documents by {excess.sum():,} bytes"
        if self._bad_records and self._bad_records.counts:
            text += f"; skipped {self._bad_records.summary()}"
        return text

    def _place(self, position: Position) -> int:
        if not isinstance(position, int):
            raise SourceError(changed(self.name))
        return position

    def _explain_nothing(self) -> str:
        text = f"data.sources.{self.name} has {len(self.source)} documents and none to train on; give it more documents"
        if len(self.source):
            text += f", or lower data.held_out_fraction = {self.settings.held_out_fraction}"
        if self._bad_records and self._bad_records.named:
            text += f". Skipped: {self._bad_records.summary()}; the first: {self._bad_records.named[0]}"
        return text
