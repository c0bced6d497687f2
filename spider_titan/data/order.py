"""The order in which the documents of a source are read."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def permutation(num_documents: int, *, seed: int, epoch: int, source: str) -> NDArray[np.int64]:
    """Returns an order of ``num_documents`` that depends on (seed, epoch, source) alone.

    It sorts raw random words: numpy promises the stream of a bit generator for good, that of ``permutation`` only
    within a release.
    """
    key = hashlib.blake2b(f"{seed}/{epoch}/{source}".encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(key, "little")).random_raw(num_documents)
    return np.argsort(words, kind="stable")


class DocumentOrder:
    """The endless order of one source as one rank sees it: epoch after epoch, each permuted anew.

    The epochs form one global sequence, of which a rank reads the positions g with g % world_size == rank. So every
    document is read once an epoch by exactly one rank, also where there are fewer documents than ranks.

    Args:
        num_documents: Training documents of the source, at least one.
        seed: ``training.seed``.
        source: Name of the source.
        rank: This rank among the data-parallel ones.
        world_size: How many of them there are.
    """

    def __init__(self, num_documents: int, *, seed: int, source: str, rank: int, world_size: int) -> None:
        assert num_documents > 0
        assert 0 <= rank < world_size
        self.num_documents = num_documents
        self.seed = seed
        self.source = source
        self.world_size = world_size
        self.position = rank
        """Global position of the next document; with the arguments above it is the whole state."""
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    @property
    def epoch(self) -> int:
        """Epoch of the next document, from 0."""
        return self.position // self.num_documents

    def next(self) -> int:
        """Returns the number of the next document, below ``num_documents``, and moves on."""
        if self.epoch != self._epoch:
            self._epoch = self.epoch
            self._permutation = permutation(self.num_documents, seed=self.seed, epoch=self._epoch, source=self.source)
        document = int(self._permutation[self.position % self.num_documents])
        self.position += self.world_size
        return document
