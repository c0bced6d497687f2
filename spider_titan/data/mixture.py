"""Which source the next document comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spider_titan.curriculum import PhaseConfig
from spider_titan.data.order import DocumentOrder
from spider_titan.data.sources import SplitSource
from spider_titan.data.tokenizer import Ids, cut_at_character_boundary, encode


class Mixture:
    """Draws documents so that each source's share of the ids follows the weights of the phase.

    The next document comes from the source that has had the least, measured against its weight. No chance is
    involved, so a share is off by a document or two at most. A source keeps its place in its order from phase to phase.

    Args:
        sources: At least those that the phases give a weight.
        phases: The curriculum's phases.
        seed: ``training.seed``.
        rank: This rank among the data-parallel ones.
        world_size: How many of them there are.
        max_document_bytes: Longer documents are cut to this; 0: never.
    """

    def __init__(
        self,
        sources: Mapping[str, SplitSource],
        phases: Sequence[PhaseConfig],
        *,
        seed: int,
        rank: int,
        world_size: int,
        max_document_bytes: int = 0,
    ) -> None:
        self._sources = sources
        self._phases = phases
        self._max_document_bytes = max_document_bytes
        self.orders = {
            name: DocumentOrder(len(source.train), seed=seed, source=name, rank=rank, world_size=world_size)
            for name, source in sorted(sources.items())
        }
        self.phase = -1
        self.drawn: dict[str, int] = {}
        """Ids that the phase has had of each source it reads."""

    def enter_phase(self, phase: int, waiting: Mapping[str, int]) -> None:
        """Makes ``phase`` the one in force; counts start anew if it was another.

        Args:
            phase: Index of the phase.
            waiting: Source -> ids of its documents under way that are still to come. They fall in the new phase, and
                count there.
        """
        if phase == self.phase:
            return
        self.phase = phase
        self.drawn = {name: 0 for name, weight in sorted(self._phases[phase].weights.items()) if weight > 0}
        for name in self.drawn:
            self.drawn[name] = waiting.get(name, 0)

    def next_document(self) -> tuple[str, Ids]:
        """Returns the next document's source and ids."""
        weights = self._phases[self.phase].weights
        name = min(self.drawn, key=lambda source: self.drawn[source] / weights[source])
        source = self._sources[name]
        document = source.train_document(self.orders[name].next())
        if self._max_document_bytes:
            document = cut_at_character_boundary(document, self._max_document_bytes)
        ids = encode(document)
        self.drawn[name] += ids.size
        return name, ids
