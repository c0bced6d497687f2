"""Which source a row is made of: a pure function of the curriculum, the seed, the step and the row's place.

Nothing is counted on the way, so a run can begin at any step, and on any number of ranks.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from spider_titan.curriculum import Curriculum
from spider_titan.data.order import permutation


@dataclass(frozen=True)
class _Split:
    """Sources in two parts. Of the first n rows of both, the left part has n * share of them, rounded."""

    left: _Split | str
    right: _Split | str
    share: Fraction

    def left_rows(self, n: int) -> int:
        # In integers: a product of floats can grow by two from one row to the next.
        return (2 * n * self.share.numerator + self.share.denominator) // (2 * self.share.denominator)


class Mixture:
    """An endless sequence of sources, each as often as its weight says and as evenly spread as can be.

    The sources are the leaves of a Huffman tree. A split of the tree sends every row it gets to one side, by rounding;
    for two sources that is error diffusion. Of the first n rows, whatever n is, a part has its share to within half a
    row of rounding, plus its share of the error of the part above. A part that is split again has at most 2/3 of the
    part above, so a source is never off by more than two rows; the most seen, with up to 20 sources, is 1.22.

    Args:
        weights: Source name -> weight, at least one above 0; they need not add up to 1.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        # From its decimal form a weight is what the user wrote: 0.7 to 0.3 is 7 to 3.
        shares = {name: Fraction(str(weight)) for name, weight in sorted(weights.items()) if weight > 0}
        assert shares
        heap: list[tuple[Fraction, int, _Split | str]]
        heap = [(share, number, name) for number, (name, share) in enumerate(shares.items())]
        heapq.heapify(heap)
        for number in range(len(heap), 2 * len(heap) - 1):
            small, _, right = heapq.heappop(heap)
            large, _, left = heapq.heappop(heap)
            heapq.heappush(heap, (small + large, number, _Split(left, right, large / (small + large))))
        self._root = heap[0][2]

    def source_of(self, row: int) -> str:
        """The source of a row, counted from 0."""
        node = self._root
        while isinstance(node, _Split):
            on_the_left = node.left_rows(row)
            if node.left_rows(row + 1) > on_the_left:
                node, row = node.left, on_the_left
            else:
                node, row = node.right, row - on_the_left
        return node


class RowPlan:
    """Says which source each row of a step is made of.

    The rows of a phase, step after step, follow its ``Mixture``. The rows of a step are placed in an order drawn anew
    each step; with a fixed one a place, and the shards that it reads, could meet the same few sources for ever.

    Args:
        curriculum: Step -> phase.
        num_rows: Rows of a step over all ranks.
        seed: ``training.seed``.
    """

    def __init__(self, curriculum: Curriculum, *, num_rows: int, seed: int) -> None:
        self._num_rows = num_rows
        self._curriculum = curriculum
        self._mixtures = [Mixture(phase.weights) for phase in curriculum.phases]
        self._seed = seed
        self._first_steps: dict[int, int] = {}
        """Phase -> its first step."""

    def sources_at(self, step: int, places: Sequence[int]) -> list[str]:
        """The source of the rows at ``places`` of ``step``, counted from 0."""
        phase = self._curriculum.index_at(step)
        if phase not in self._first_steps:
            self._first_steps[phase] = bisect.bisect_left(range(step), phase, key=self._curriculum.index_at)
        first_row = (step - self._first_steps[phase]) * self._num_rows
        order = permutation(self._num_rows, f"{self._seed}/step/{step}")
        source_of = self._mixtures[phase].source_of
        return [source_of(first_row + number) for number in order[list(places)].tolist()]
