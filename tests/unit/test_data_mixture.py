import random
from collections import Counter
from fractions import Fraction

import pytest

from spider_titan.curriculum import Curriculum, PhaseConfig
from spider_titan.data.mixture import Mixture, RowPlan


def sequence(weights: dict[str, float], rows: range) -> list[str]:
    mixture = Mixture(weights)
    return [mixture.source_of(row) for row in rows]


def worst_error(weights: dict[str, float], num_rows: int) -> float:
    """The most that a source is off its share after any number of rows, in rows."""
    total = sum(Fraction(str(weight)) for weight in weights.values())
    shares = {name: float(Fraction(str(weight)) / total) for name, weight in weights.items()}
    counts = dict.fromkeys(weights, 0)
    worst = 0.0
    for done, source in enumerate(sequence(weights, range(num_rows)), start=1):
        counts[source] += 1
        worst = max(worst, *(abs(counts[name] - done * share) for name, share in shares.items()))
    return worst


def random_weights(rng: random.Random, num_sources: int) -> dict[str, float]:
    """Weights that are alike, or very different, or between the two."""
    spread = rng.choice([0.2, 1, 5])
    return {f"s{number}": round(rng.gammavariate(spread, 1) + 1e-4, 4) for number in range(num_sources)}


@pytest.mark.parametrize(("num_sources", "bound"), [(1, 0), (2, 0.5), (3, 1), (4, 1.1), (6, 1.2), (12, 1.25)])
def test_a_source_has_its_share_after_any_number_of_rows(num_sources: int, bound: float) -> None:
    rng = random.Random(num_sources)
    for _ in range(40):
        weights = random_weights(rng, num_sources)
        assert worst_error(weights, 400) <= bound + 1e-9, weights


@pytest.mark.parametrize(
    "weights",
    [
        [1] * 5,
        [1] * 16,
        [1, 1, 2, 3, 5, 8, 13, 21, 34],
        [0.9, 0.05, 0.05],
        [1000, 1, 1, 1, 1],
        [0.2, 0.5],
        [1e-7, 1, 3e-5],
    ],
)
def test_shares_of_weights_that_users_write(weights: list[float]) -> None:
    assert worst_error({f"s{number}": weight for number, weight in enumerate(weights)}, 2000) <= 1


def test_rows_far_on_have_the_same_shares() -> None:
    counts = Counter(sequence({"a": 0.6, "b": 0.3, "c": 0.1}, range(10**15 + 7, 10**15 + 1007)))
    assert counts == {name: pytest.approx(rows, abs=2) for name, rows in {"a": 600, "b": 300, "c": 100}.items()}


def test_weights_count_by_their_ratio_alone() -> None:
    expected = sequence({"a": 7, "b": 2, "c": 1}, range(200))
    assert Counter(expected[:10]) == {"a": 7, "b": 2, "c": 1}
    assert sequence({"c": 0.1, "a": 0.7, "b": 0.2}, range(200)) == expected
    assert sequence({"d": 0, "b": 2e-9, "a": 7e-9, "c": 1e-9}, range(200)) == expected


def plan(phases: list[PhaseConfig], *, steps: int, num_rows: int, seed: int = 1) -> RowPlan:
    curriculum = Curriculum(phases, byte_budget=steps * num_rows, bytes_per_step=num_rows)
    return RowPlan(curriculum, num_rows=num_rows, seed=seed)


PHASES = [
    PhaseConfig(until=0.3, weights={"a": 1}),
    PhaseConfig(until=0.6, weights={"a": 7, "b": 3}),
    PhaseConfig(until=1.0, weights={"a": 0.2, "b": 0.0, "c": 0.5}),
]


@pytest.mark.parametrize("num_rows", [1, 4, 7])
def test_a_phase_begins_with_its_step_and_has_its_shares(num_rows: int) -> None:
    rows = plan(PHASES, steps=100, num_rows=num_rows)
    shares = [{"a": 1, "b": 0, "c": 0}, {"a": 0.7, "b": 0.3, "c": 0}, {"a": 2 / 7, "b": 0, "c": 5 / 7}]
    for steps, expected in zip([range(30), range(30, 60), range(60, 100)], shares, strict=True):
        counts = Counter()
        for step in steps:
            counts.update(rows.sources_at(step, range(num_rows)))
            done = (step - steps.start + 1) * num_rows
            for source, share in expected.items():
                assert abs(counts[source] - share * done) <= (0 if share in (0, 1) else 1), (step, source)


def test_rows_are_counted_from_the_first_step_of_their_phase() -> None:
    phases = [PhaseConfig(until=0.325, weights={"a": 1}), PhaseConfig(weights={"a": 5, "b": 3, "c": 2})]
    rows, mixture = plan(phases, steps=100, num_rows=7), Mixture(phases[1].weights)
    for step in range(33, 100):
        expected = Counter(mixture.source_of(row) for row in range((step - 33) * 7, (step - 32) * 7))
        assert Counter(rows.sources_at(step, range(7))) == expected


def test_a_step_is_planned_without_those_before_it_and_without_other_places() -> None:
    rows = plan(PHASES, steps=100, num_rows=6)
    expected = [rows.sources_at(step, range(6)) for step in range(100)]
    for step in random.Random(0).sample(range(100), 40):
        fresh = plan(PHASES, steps=100, num_rows=6)
        assert fresh.sources_at(step, [4, 1]) == [expected[step][4], expected[step][1]]


def test_the_last_phase_goes_on_after_its_end() -> None:
    rows = plan(PHASES, steps=100, num_rows=4)
    counts = Counter(source for step in range(60, 200) for source in rows.sources_at(step, range(4)))
    assert counts == {"a": 160, "c": 400}


@pytest.mark.parametrize("num_rows", [2, 3, 10])
def test_every_place_meets_every_source(num_rows: int) -> None:
    # With a fixed order in a step, places and these weights would beat.
    rows = plan([PhaseConfig(weights={"a": 5, "b": 3, "c": 2})], steps=400, num_rows=num_rows)
    steps = [rows.sources_at(step, range(num_rows)) for step in range(400)]
    for place in range(num_rows):
        counts = Counter(step[place] for step in steps)
        assert counts == {
            "a": pytest.approx(200, abs=40),
            "b": pytest.approx(120, abs=40),
            "c": pytest.approx(80, abs=40),
        }


def test_the_plan_is_pinned() -> None:
    # A change here changes the data of every run that is resumed.
    rows = plan([PhaseConfig(weights={"a": 5, "b": 3, "c": 2})], steps=10, num_rows=10)
    planned = ["".join(rows.sources_at(step, range(10))) for step in (0, 1, 7)]
    assert planned == ["bbbaaaacac", "abbccaaaab", "accabaabba"]
    other = plan([PhaseConfig(weights={"a": 5, "b": 3, "c": 2})], steps=10, num_rows=10, seed=2)
    assert other.sources_at(0, range(10)) != rows.sources_at(0, range(10))
