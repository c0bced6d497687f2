"""The schedules against plain formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest

from spider_titan.optim import LRSchedulerConfig, OptimizerConfig, lr_factor


def factors(total: int, **settings: Any) -> list[float]:
    """Of all steps of a run."""
    config = LRSchedulerConfig(**settings)
    return [lr_factor(config, step, total) for step in range(total)]


def test_cosine() -> None:
    found = factors(12, warmup_steps=4, min_lr_factor=0.1)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[4:] == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * done / 8)) / 2 for done in range(1, 9)])


def test_linear() -> None:
    found = factors(12, warmup_steps=2, decay="linear", min_lr_factor=0.5)
    assert found == pytest.approx([0.5, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5])


def test_warmup_stable_decay() -> None:
    found = factors(10, warmup_steps=2, decay="wsd", decay_ratio=0.4, min_lr_factor=0.2)
    assert found == pytest.approx([0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2])
    # Unset: a fifth of the run.
    assert factors(10, warmup_steps=0, decay="wsd", min_lr_factor=0.0) == pytest.approx([1.0] * 8 + [0.5, 0.0])
    assert factors(4, warmup_steps=0, decay="wsd", decay_ratio=1.0, min_lr_factor=0.0) == factors(
        4, warmup_steps=0, decay="linear", min_lr_factor=0.0
    )


def test_a_decay_that_would_begin_within_the_warmup_begins_after_it() -> None:
    found = factors(10, warmup_steps=8, decay="wsd", decay_ratio=0.5, min_lr_factor=0.0)
    assert found == pytest.approx([done / 8 for done in range(1, 9)] + [0.5, 0.0])


def test_a_share_below_one_step_is_one_step() -> None:
    assert factors(5, warmup_steps=0, decay="wsd", decay_ratio=0.01, min_lr_factor=0.3) == [1.0, 1.0, 1.0, 1.0, 0.3]


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize(("warmup", "total"), [(0, 1), (0, 10), (1, 1), (5, 5), (10, 3)])
def test_odd_lengths(decay: str, warmup: int, total: int) -> None:
    found = factors(total, warmup_steps=warmup, decay=decay, min_lr_factor=0.2)
    assert all(0 < factor <= 1 for factor in found)
    if warmup < total:
        assert found[-1] == pytest.approx(0.2)
        assert found[warmup:] == sorted(found[warmup:], reverse=True)
    else:
        assert found == [(step + 1) / warmup for step in range(total)]


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
def test_after_the_last_step_the_rate_stays_at_its_minimum(decay: str) -> None:
    config = LRSchedulerConfig(warmup_steps=2, decay=decay, min_lr_factor=0.3)  # type: ignore[arg-type]
    assert lr_factor(config, 50, 10) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"lr": 0.0}, "lr"),
        ({"beta1": 1.0}, "beta1"),
        ({"beta2": -0.1}, "beta2"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -1.0}, "weight_decay"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, float], key: str) -> None:
    with pytest.raises(ValueError, match=f"^{key} = "):
        OptimizerConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps = -1 is negative"),
        ({"min_lr_factor": 1.5}, "min_lr_factor = 1.5 is not in"),
        ({"min_lr_factor": -0.1}, "min_lr_factor = -0.1 is not in"),
        ({"decay": "wsd", "decay_ratio": 0.0}, "decay_ratio = 0.0 is not in"),
        ({"decay": "wsd", "decay_ratio": 1.1}, "decay_ratio = 1.1 is not in"),
        (
            {"decay": "cosine", "decay_ratio": 0.3},
            'decay_ratio = 0.3 is of decay = "wsd" alone, not of "cosine"; leave',
        ),
    ],
)
def test_impossible_schedules_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LRSchedulerConfig(**settings)
