"""The order in which the documents of a source are read."""

from __future__ import annotations

import functools
import hashlib

import numpy as np
from numpy.typing import NDArray

KEPT_NUMBERS = 2**22
"""Length of the permutations that an order keeps, in all: shards do not come to an epoch's end together, and those of
a small source are many epochs apart."""


def permutation(length: int, key: str) -> NDArray[np.int64]:
    """Returns an order of ``length`` things that depends on ``key`` alone.

    It sorts raw random words: numpy promises the stream of a bit generator for good, that of ``permutation`` only
    within a release.
    """
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(length)
    return np.argsort(words, kind="stable")


class DocumentOrder:
    """The endless order of one source: epoch after epoch, each permuted anew.

    Shards divide it by position: shard v reads the positions g with g % num_shards == v. So every document is read once
    an epoch by exactly one shard, also where there are fewer documents than shards.

    Args:
        num_documents: Training documents of the source, at least one.
        seed: ``training.seed``.
        source: Name of the source.
    """

    def __init__(self, num_documents: int, *, seed: int, source: str) -> None:
        assert num_documents > 0
        self.num_documents = num_documents
        self._epoch = functools.lru_cache(max(2, KEPT_NUMBERS // num_documents))(
            lambda epoch: permutation(num_documents, f"{seed}/{epoch}/{source}")
        )

    def at(self, position: int) -> int:
        """Returns the number, below ``num_documents``, of the document at a position of the order, from 0."""
        epoch, place = divmod(position, self.num_documents)
        return int(self._epoch(epoch)[place])
