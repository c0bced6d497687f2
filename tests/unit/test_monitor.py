"""Every warning of the monitor, forced by the fault that it names; and samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from spider_titan.metrics import MetricsLogger
from spider_titan.models.spider import Spider
from spider_titan.monitor import MonitorConfig, RecurrentMonitor
from spider_titan.samples import CELL_PIXELS, expert_map, segmented_text
from spider_titan.spec import Batch, StepContext, get_model_spec
from spider_titan.vocabulary import BOS_ID, EOS_ID, PAD_ID

from .reference.tiny import next_ids, packed_rows, spider_config

SPIDER = get_model_spec("spider")


def monitor_of(state: dict[str, Any] | None = None, **config: Any) -> tuple[RecurrentMonitor, list[str]]:
    warnings: list[str] = []
    state = {} if state is None else state
    defaults = {"expert_window": 1, "max_boundary_rate": 0.8}
    return RecurrentMonitor(MonitorConfig(**{**defaults, **config}), state, warnings.append), warnings


def warnings_of(fault: Callable[[Spider], object], **config: Any) -> list[str]:
    """What the monitor says of a fresh model's metrics, after ``fault`` has changed it."""
    model = SPIDER.build(spider_config(engram_layers=()), seed=0).train()
    with torch.no_grad():
        fault(model)
        ids = packed_rows()
        sums = SPIDER.loss(model, Batch(ids, next_ids(ids)), StepContext(num_targets=100)).sums
    monitor, warnings = monitor_of(**config)
    monitor.observe(7, SPIDER.metrics(sums), sums)
    return warnings


def have_boundaries(model: Spider) -> None:
    """At about half of the bytes."""
    model.boundary_predictor.bias.copy_(-model.boundary_predictor.output.bias[0])


def drift(model: Spider) -> None:
    model.core.adapter.up_proj.weight.normal_()
    model.core.adapter.scale.weight[2] = 1000.0


def collapse(model: Spider) -> None:
    # All positions look alike to the router, and it likes the second expert.
    model.core.loop_embedding.weight.fill_(1000.0)
    model.core.layers[0].moe.router.weight[1] = 10.0


def death(model: Spider) -> None:
    model.core.layers[1].moe.router.balance_bias[2] = -100.0


def eager_boundaries(model: Spider) -> None:
    model.boundary_predictor.bias.fill_(100.0)


def shy_boundaries(model: Spider) -> None:
    model.boundary_predictor.bias.fill_(-100.0)


def test_a_healthy_model_is_left_alone() -> None:
    assert warnings_of(have_boundaries) == []


@pytest.mark.parametrize(
    ("fault", "config", "kinds"),
    [
        (drift, {}, ["drift"]),
        # The layer that has collapsed to one expert starves others.
        (collapse, {}, ["collapse", "dead experts"]),
        (death, {}, ["dead experts"]),
        (eager_boundaries, {}, ["boundary rate"]),
        # Only ends of documents are left, too few segments to judge the experts by.
        (shy_boundaries, {"min_boundary_rate": 0.3, "min_expert_load": 0.0}, ["boundary rate"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_fault_is_named(fault: Callable[[Spider], None], config: dict[str, Any], kinds: list[str]) -> None:
    def with_rate(model: Spider) -> None:
        have_boundaries(model)
        fault(model)

    warnings = warnings_of(with_rate, **config)
    assert [warning.split(": ")[2] for warning in warnings] == kinds
    assert all(warning.startswith("monitor: step 7: ") for warning in warnings)


def test_warnings_have_the_numbers() -> None:
    monitor, warnings = monitor_of(min_boundary_rate=0.1)
    load = {"expert_load": torch.tensor([[[2.0, 10.0], [20.0, 0.0]], [[8.0, 0.0], [0.0, 0.0]]])}
    values = {"hidden_norm/1": 2.0, "hidden_norm/2": 30.0, "routing_entropy/1": 0.5, "routing_entropy/2": 0.125}
    monitor.observe(3, {**values, "boundary_rate": 0.05, "boundary_dropped_share": 0.25}, load)
    assert warnings == [
        "monitor: step 3: drift: the hidden norm grows from 2 after loop 1 to 30 after loop 2, more than "
        "monitor.drift_ratio = 10 times",
        "monitor: step 3: collapse: the routing entropy is 0.125 of its maximum in loop 2, below "
        "monitor.min_routing_entropy = 0.2",
        "monitor: step 3: dead experts: 1 of 4 had less than monitor.min_expert_load = 0.02 of an even load over 1 "
        "logged steps: layer 2 expert 2; the lowest had 0.0000",
        "monitor: step 3: boundary rate: 0.0500 of the bytes close a segment, outside monitor.min_boundary_rate = 0.1 "
        ".. monitor.max_boundary_rate = 0.8",
        "monitor: step 3: dropped boundaries: 0.2500 of the boundaries found no slot, above "
        "monitor.max_boundary_dropped = 0.05: the rate is at the phase's max_boundary_rate",
    ]


def test_a_rate_at_the_slots_is_seen_by_what_is_dropped() -> None:
    """With the default bounds: the rate is counted after dropping, and looks well."""
    model = SPIDER.build(spider_config(), seed=0).train()
    ids = packed_rows()
    with torch.no_grad():
        have_boundaries(model)
        context = StepContext(num_targets=100, max_boundary_rate=0.4)
        sums = SPIDER.loss(model, Batch(ids, next_ids(ids)), context).sums
    values = SPIDER.metrics(sums)
    assert MonitorConfig().min_boundary_rate < values["boundary_rate"] < MonitorConfig().max_boundary_rate
    warnings: list[str] = []
    RecurrentMonitor(MonitorConfig(), {}, warnings.append).observe(7, values, sums)
    assert [warning.split(": ")[2] for warning in warnings] == ["dropped boundaries"]


def test_a_warning_comes_again_only_after_a_while() -> None:
    monitor, warnings = monitor_of(repeat_steps=10)
    for step in range(1, 25):
        monitor.observe(step, {"boundary_rate": 0.9}, {})
    assert [warning.split(": ")[1] for warning in warnings] == ["step 1", "step 11", "step 21"]


def test_experts_are_judged_over_the_window() -> None:
    monitor, warnings = monitor_of(expert_window=3)
    seldom, never = torch.tensor([[[9.0, 1.0, 0.0]]]), torch.tensor([[[9.0, 0.0, 0.0]]])
    for step, load in enumerate((never, seldom, never), 1):
        assert warnings == []
        monitor.observe(step, {}, {"expert_load": load})
    assert len(warnings) == 1 and "1 of 3 " in warnings[0] and "layer 1 expert 3;" in warnings[0]


def test_a_spike_stands_out_of_its_window() -> None:
    monitor, warnings = monitor_of()
    for step in range(1, 61):
        monitor.observe_loss(step, 3.0 - 0.01 * step + 0.1 * (step % 3))
    assert warnings == []
    monitor.observe_loss(61, 5.0)
    assert len(warnings) == 1 and "step 61: loss spike: the loss is 5.0000, while the last 60 steps had" in warnings[0]
    monitor, warnings = monitor_of(spike_deviations=1e6)
    for step in range(1, 61):
        monitor.observe_loss(step, 5.0 if step == 60 else 3.0 - 0.01 * step)
    assert warnings == []


def test_the_state_goes_on_where_it_was() -> None:
    """Through JSON, as in a checkpoint, at every step."""
    whole, expected = monitor_of(expert_window=4, repeat_steps=5)
    state: dict[str, Any] = {}
    actual: list[str] = []
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 40):
        load = {"expert_load": torch.tensor([[[9.0, 9.0, 0.0, 0.1]]])}
        loss = 9.0 if step == 35 else float(torch.rand((), generator=generator))
        part, warnings = monitor_of(state, expert_window=4, repeat_steps=5)
        for monitor in (whole, part):
            monitor.observe_loss(step, loss)
            monitor.observe(step, {"boundary_rate": 0.9}, load)
        actual += warnings
        state = json.loads(json.dumps(state))
    assert actual == expected
    assert {warning.split(": ")[2] for warning in actual} == {"loss spike", "dead experts", "boundary rate"}


def test_switched_off_it_is_silent() -> None:
    monitor, warnings = monitor_of(enable=False)
    monitor.observe(1, {"boundary_rate": 0.9}, {"expert_load": torch.tensor([[[9.0, 0.0]]])})
    for step in range(1, 50):
        monitor.observe_loss(step, float(step == 40))
    assert warnings == []


def test_numbers_that_are_not_finite_leave_no_trace() -> None:
    state: dict[str, Any] = {}
    monitor, warnings = monitor_of(state, expert_window=2)
    monitor.observe(1, {"boundary_rate": float("nan")}, {"expert_load": torch.tensor([[[torch.nan, 1.0]]])})
    assert warnings == [] and state["load_steps"] == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("drift_ratio", 1.0),
        ("min_routing_entropy", 1.5),
        ("min_boundary_rate", 0.9),
        ("max_boundary_dropped", 5.0),
        ("spike_deviations", 0.0),
        ("spike_window", 5),
        ("sample_freq", -1),
    ],
)
def test_mistakes_are_named(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        MonitorConfig(**{key: value})


def test_text_shows_its_segments() -> None:
    ids = [BOS_ID, *b"ab cd\n", EOS_ID, BOS_ID, 101, PAD_ID]
    assert segmented_text(ids, [index in (3, 6, 7) for index in range(len(ids))]) == ("    <BOS>ab |cd\\n|<EOS>|<BOS>e")
    halves = [*"aü".encode(), 98]
    assert segmented_text(halves, [False, True, False, True]) == "    a\\xc3|\\xbcb|"
    assert len(segmented_text([97] * 5000, [True] * 5000).replace("|", "").replace("\n", "").replace(" ", "")) == 1024


def test_the_map_is_a_square_an_expert() -> None:
    picture = expert_map(np.array([[[1.0, 0.0, 1.0], [6.0, 0.0, 0.0]], [[0.0, 1.0, 0.0], [3.0, 0.0, 0.0]]]))
    assert picture.shape == (2 * CELL_PIXELS, 3 * CELL_PIXELS) and picture.dtype == np.uint8
    assert picture[::CELL_PIXELS, ::CELL_PIXELS].tolist() == [[128, 128, 128], [255, 0, 0]]


def test_tensorboard_has_text_and_picture(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path / "metrics.jsonl", total_steps=5, tensorboard_folder=tmp_path / "tb")
    logger.log_sample(3, "    a|b|", expert_map(np.array([[[1.0, 0.0]]])))
    logger.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    (text,) = events.Tensors("samples/segments/text_summary")
    assert text.step == 3 and text.tensor_proto.string_val[0].decode() == "    a|b|"
    (image,) = events.Images("samples/expert_load")
    assert (image.step, image.width, image.height) == (3, 2 * CELL_PIXELS, CELL_PIXELS)
