"""Bad records: counted by kind and named in the log, or the end of the run."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Literal

from spider_titan.data.records import BadRecord

logger = logging.getLogger(__name__)

OnBadRecord = Literal["skip", "stop"]


def changed(source: str) -> str:
    """Says that a checkpoint's position is not one in the documents of ``source``."""
    return (
        f"data.sources.{source}: the documents are not those that the checkpoint was made with; name the files, or the "
        f"hub revision, that they were read from, or begin a new run"
    )


NAMED = 20
"""Bad records of a kind that are named; the others are counted."""


class SourceError(ValueError):
    """A source cannot be read on: one line that names it, and what the user can do."""


class EndOfData(Exception):
    """A source that is not to repeat has no full row left for one of the shards. Ends the run, without a mistake."""


class BadRecords:
    """Bad records of one source.

    Args:
        source: Its name in ``[data.sources]``.
        policy: ``skip`` counts them, ``stop`` ends at the first.
    """

    def __init__(self, source: str, policy: OnBadRecord) -> None:
        self._source, self._policy = source, policy
        self.counts: Counter[str] = Counter()
        """Kind -> how many there were."""
        self.named: list[BadRecord] = []
        """The first ``NAMED`` of every kind, in the order they were met."""

    def add(self, record: BadRecord) -> None:
        """Counts a bad record, and names it in the log if it is one of the first of its kind.

        Raises:
            SourceError: If bad records are to stop the run.
        """
        if self._policy == "stop":
            raise SourceError(
                f'data.sources.{self._source}: {record}. To leave out bad records set data.on_bad_record = "skip"'
            )
        self.counts[record.kind] += 1
        count = self.counts[record.kind]
        if count <= NAMED:
            self.named.append(record)
            logger.warning("data.sources.%s: %s: %s; skipped", self._source, record.kind, record)
        elif count & (count - 1) == 0:
            logger.warning("data.sources.%s: %s: %s so far, skipped", self._source, record.kind, f"{count:,}")

    def summary(self) -> str:
        """``3 empty document, 1 not JSON``; empty if there was none."""
        return ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.counts.items()))
