"""Which phase a step is in, and what a phase asks of the model."""

from __future__ import annotations

import re
from typing import Any

import pytest

from spider_titan.curriculum import Curriculum, PhaseConfig, check_phases


def phases(*ends: float) -> list[PhaseConfig]:
    return [PhaseConfig(until=end) for end in ends]


@pytest.mark.parametrize(("byte_budget", "bytes_per_step"), [(1000, 10), (1000, 7), (1000, 1000), (10**10, 2**21)])
def test_a_phase_ends_at_its_share_of_the_budget(byte_budget: int, bytes_per_step: int) -> None:
    curriculum = Curriculum(phases(0.25, 0.5, 1.0), byte_budget=byte_budget, bytes_per_step=bytes_per_step)
    steps = -(-byte_budget // bytes_per_step)
    for step in {0, 1, steps // 4, steps // 4 + 1, steps // 2, steps // 2 + 1, steps - 1} & set(range(steps)):
        consumed = step * bytes_per_step
        expected = 0 if 4 * consumed < byte_budget else 1 if 2 * consumed < byte_budget else 2
        assert curriculum.index_at(step) == expected
        assert curriculum.at(step) is curriculum.phases[expected]


def test_the_switch_is_at_the_first_step_that_starts_at_the_end() -> None:
    curriculum = Curriculum(phases(0.3, 1.0), byte_budget=100, bytes_per_step=10)
    assert [curriculum.index_at(step) for step in range(10)] == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]


def test_steps_beyond_the_budget_are_in_the_last_phase() -> None:
    curriculum = Curriculum(phases(0.5, 1.0), byte_budget=100, bytes_per_step=10)
    assert curriculum.index_at(10) == curriculum.index_at(500) == 1


def test_a_phase_shorter_than_a_step_is_passed_over() -> None:
    curriculum = Curriculum(phases(0.41, 0.42, 1.0), byte_budget=100, bytes_per_step=10)
    assert [curriculum.index_at(step) for step in range(4, 6)] == [0, 2]


@pytest.mark.parametrize(
    ("settings", "mode", "capacity"),
    [
        ({"boundary": "fixed"}, "topk", 0.34),
        ({"boundary": "fixed", "selection": "threshold"}, "threshold", 0.34),
        ({"boundary": "adaptive"}, "threshold", 0.45),
        ({"boundary": "adaptive", "selection": "topk"}, "threshold", 0.45),
        ({"boundary": "fixed", "max_boundary_rate": 0.5}, "topk", 0.5),
        ({"boundary": "adaptive", "max_boundary_rate": 1.0}, "threshold", 1.0),
    ],
)
def test_a_phases_boundaries(settings: dict[str, Any], mode: str, capacity: float) -> None:
    phase = PhaseConfig(**settings)
    assert (phase.boundary_mode, phase.boundary_capacity) == (mode, capacity)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"until": 0.0}, "until = 0.0"),
        ({"until": 1.01}, "until = 1.01"),
        ({"max_boundary_rate": 0.0}, "max_boundary_rate = 0.0"),
        ({"max_boundary_rate": 1.5}, "max_boundary_rate = 1.5"),
        ({"weights": {"web": 1.0, "books": -0.5}}, "a weight is negative"),
    ],
)
def test_impossible_phases_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        PhaseConfig(**settings)


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ((), "empty"),
        ((0.5, 0.5, 1.0), "must increase"),
        ((0.6, 0.4, 1.0), "must increase"),
        ((0.5, 0.9), "until = 1.0"),
    ],
)
def test_phases_must_increase_to_one(ends: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=rf"data\.phases.*{re.escape(message)}"):
        check_phases(phases(*ends))
    with pytest.raises(ValueError, match=r"data\.phases"):
        Curriculum(phases(*ends), byte_budget=10, bytes_per_step=1)
