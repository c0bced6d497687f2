import random
from collections.abc import Iterator

import pytest

from spider_titan.curriculum import Curriculum, PhaseConfig
from spider_titan.data.loader import RowStream
from spider_titan.data.mixture import Mixture
from spider_titan.data.sources import BuiltinSource, SplitSource

# Each source writes with a byte of its own, so that a row tells where its ids come from.
MARKS = {"a": b"a", "b": b"b", "c": b"c"}


def sources(seed: int = 0, longest: int = 400) -> dict[str, SplitSource]:
    rng = random.Random(seed)
    return {
        name: SplitSource(name, BuiltinSource([mark * rng.randint(0, longest) for _ in range(50)]), 0.05)
        for name, mark in MARKS.items()
    }


def mixture(phases: list[PhaseConfig], longest: int = 400, **arguments: int) -> Mixture:
    return Mixture(sources(longest=longest), phases, **{"seed": 1, "rank": 0, "world_size": 1, **arguments})


def shares(rows: list[list[int]]) -> dict[str, float]:
    """Share of each source among the bytes of the targets."""
    targets = [number for row in rows for number in row[1:]]
    counts = {name: targets.count(mark[0]) for name, mark in MARKS.items()}
    return {name: count / sum(counts.values()) for name, count in counts.items()}


def rows_of(phases: list[PhaseConfig], *, steps: int, seq_len: int, rows_per_step: int, **arguments: int) -> Iterator:
    curriculum = Curriculum(phases, byte_budget=steps * rows_per_step * seq_len, bytes_per_step=rows_per_step * seq_len)
    stream = RowStream(mixture(phases, **arguments), curriculum, seq_len=seq_len, rows_per_step=rows_per_step)
    return ([int(number) for number in row] for row in stream)


def test_every_phase_gets_its_shares_within_two_points() -> None:
    phases = [
        PhaseConfig(until=0.3, weights={"a": 1}),
        PhaseConfig(until=0.6, weights={"a": 7, "b": 3}),
        PhaseConfig(until=1.0, weights={"a": 0.2, "b": 0.0, "c": 0.5}),
    ]
    rows = rows_of(phases, steps=100, seq_len=256, rows_per_step=6)
    expected = [{"a": 1, "b": 0, "c": 0}, {"a": 0.7, "b": 0.3, "c": 0}, {"a": 2 / 7, "b": 0, "c": 5 / 7}]
    for steps, want in zip([30, 30, 40], expected, strict=True):
        got = shares([next(rows) for _ in range(steps * 6)])
        assert got == pytest.approx(want, abs=0.02)


@pytest.mark.parametrize("rows_per_step", [1, 4])
def test_a_phase_begins_with_its_step_after_the_document_under_way(rows_per_step: int) -> None:
    phases = [PhaseConfig(until=0.5, weights={"a": 1}), PhaseConfig(weights={"b": 1})]
    # Short documents: a switch that is a row late shows.
    stream = rows_of(phases, steps=20, seq_len=64, rows_per_step=rows_per_step, longest=20)
    rows = [next(stream) for _ in range(20 * rows_per_step)]
    switch = 10 * rows_per_step
    assert not any(ord("b") in row for row in rows[:switch])
    for place in range(rows_per_step):
        ids = [number for row in rows[switch + place :: rows_per_step] for number in row[1:]]
        end_of_document = ids.index(258)
        assert ord("b") not in ids[:end_of_document]
        assert ord("a") not in ids[end_of_document:]


def test_the_rest_of_a_document_counts_in_the_phase_it_falls_in() -> None:
    phases = [PhaseConfig(until=0.5, weights={"a": 1}), PhaseConfig(weights={"a": 1, "b": 1})]
    mix = mixture(phases)
    mix.enter_phase(0, {})
    mix.next_document()
    mix.enter_phase(1, {"a": 1000})
    assert mix.drawn == {"a": 1000, "b": 0}
    while mix.drawn["b"] < 1000:
        assert mix.next_document()[0] == "b"


def test_a_source_keeps_its_place_over_phases() -> None:
    phases = [PhaseConfig(until=0.5, weights={"a": 1}), PhaseConfig(weights={"a": 1, "b": 1})]
    mix, alone = mixture(phases), mixture([PhaseConfig(weights={"a": 1})])
    alone.enter_phase(0, {})
    expected = [alone.next_document()[1].tolist() for _ in range(40)]
    mix.enter_phase(0, {})
    got = [mix.next_document()[1].tolist() for _ in range(5)]
    mix.enter_phase(1, {})
    while len(got) < 40:
        source, document = mix.next_document()
        if source == "a":
            got.append(document.tolist())
    assert got == expected


def test_documents_are_cut() -> None:
    mix = mixture([PhaseConfig(weights={"a": 1})], max_document_bytes=7)
    mix.enter_phase(0, {})
    documents = [mix.next_document()[1] for _ in range(40)]
    assert max(ids.size for ids in documents) == 7 + 2
    assert all(ids[0] == 257 and ids[-1] == 258 for ids in documents)


def test_weights_need_not_be_in_any_order() -> None:
    def drawn(weights: dict[str, float]) -> list[list[int]]:
        mix = mixture([PhaseConfig(weights=weights)])
        mix.enter_phase(0, {})
        return [mix.next_document()[1].tolist() for _ in range(30)]

    assert drawn({"a": 1, "b": 2}) == drawn({"b": 2, "a": 1})
