"""Documents by number, and which of them are held out.

A document is held out by a hash of its bytes: the same rule for every source, independent of names, order, ranks and
seeds. Two documents with the same bytes are on the same side, so nothing that is validated on was trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from spider_titan.data import corpus
from spider_titan.data.config import DataConfig, SourceConfig


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


class BuiltinSource:
    """A part of the built-in corpus.

    Args:
        documents: All of it.
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


_BUILTIN_PARTS: dict[str, Callable[[], Sequence[bytes]]] = {
    "english": corpus.english,
    "code": corpus.code,
    "multilingual": corpus.multilingual,
}


class SplitSource:
    """A source, divided into training and held-out documents.

    Args:
        name: Its name in ``[data.sources]``.
        source: The documents.
        held_out_fraction: Expected share of them that is held out.

    Raises:
        ValueError: If no document is left to train on.
    """

    def __init__(self, name: str, source: Source, held_out_fraction: float) -> None:
        self.name = name
        self.source = source
        is_held_out = source.digests < int(held_out_fraction * 2**63)
        self.train = np.flatnonzero(~is_held_out)
        """Numbers of the training documents."""
        self.held_out = np.flatnonzero(is_held_out)
        """Numbers of the held-out documents."""
        if not len(self.train):
            raise ValueError(
                f"data.sources.{name} has {len(source)} documents and none to train on; give it more documents"
                + (f", or lower data.held_out_fraction = {held_out_fraction}" if len(source) else "")
            )

    def train_document(self, index: int) -> bytes:
        """Training document ``index``, below ``len(self.train)``."""
        return self.source.document(int(self.train[index]))

    def held_out_document(self, index: int) -> bytes:
        """Held-out document ``index``, below ``len(self.held_out)``."""
        return self.source.document(int(self.held_out[index]))


def open_source(name: str, config: SourceConfig) -> Source:
    """Opens one source.

    Args:
        name: Its name in ``[data.sources]``, for errors.
        config: Its configuration.

    Raises:
        ValueError: If no file matches, or a file or record cannot be read; names it.
    """
    if config.kind == "files":
        # Takes over a second to import, for nothing in a run on built-in text.
        from spider_titan.data.files import open_files

        return open_files(name, config)
    assert config.part is not None
    return BuiltinSource(_BUILTIN_PARTS[config.part]())


def load_sources(config: DataConfig) -> dict[str, SplitSource]:
    """Opens and splits the sources that some phase reads, sorted by name.

    Raises:
        ValueError: As ``open_source`` and ``SplitSource``.
    """
    return {
        name: SplitSource(name, open_source(name, config.sources[name]), config.held_out_fraction)
        for name in config.used_sources
    }


@dataclass(frozen=True)
class SourceSummary:
    """What a source holds; bytes as stored.

    Args:
        name: Its name in ``[data.sources]``.
        documents: Training documents.
        bytes: Their bytes.
        held_out_documents: Documents kept for validation.
        held_out_bytes: Their bytes.
        cut_documents: Training documents longer than ``data.max_document_bytes``.
        cut_bytes: Their bytes beyond it.
    """

    name: str
    documents: int
    bytes: int
    held_out_documents: int
    held_out_bytes: int
    cut_documents: int
    cut_bytes: int

    def __str__(self) -> str:
        text = (
            f"{self.name}: {self.documents:,} documents, {self.bytes:,} bytes; "
            f"held out {self.held_out_documents:,} documents, {self.held_out_bytes:,} bytes"
        )
        if self.cut_documents:
            text += f"; cut {self.cut_documents:,} documents by {self.cut_bytes:,} bytes"
        return text


def describe(sources: Mapping[str, SplitSource], max_document_bytes: int) -> list[SourceSummary]:
    """Counts what each source holds, and what a limit of ``max_document_bytes`` drops; 0: no limit."""
    summaries = []
    for name, split in sources.items():
        sizes, held_out_sizes = split.source.sizes[split.train], split.source.sizes[split.held_out]
        excess = np.maximum(sizes - max_document_bytes, 0) if max_document_bytes else np.zeros_like(sizes)
        summaries.append(
            SourceSummary(
                name=name,
                documents=len(sizes),
                bytes=int(sizes.sum()),
                held_out_documents=len(held_out_sizes),
                held_out_bytes=int(held_out_sizes.sum()),
                cut_documents=int((excess > 0).sum()),
                cut_bytes=int(excess.sum()),
            )
        )
    return summaries
