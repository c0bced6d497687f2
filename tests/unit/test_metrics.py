"""Console lines, metrics.jsonl, TensorBoard curves and the rate meter."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from spider_titan.metrics import (
    MetricsConfig,
    MetricsLogger,
    RateMeter,
    Value,
    format_byte_rate,
    format_duration,
    format_train_line,
)
from spider_titan.run_directory import DiskError

TRAIN_VALUES: dict[str, Value] = {
    "loss": 2.5,
    "lm_loss": 2.4130,
    "bpb": 3.4812,
    "grad_norm": 0.84,
    "lr": 1.9e-3,
    "bytes_seen": 245760,
    "bytes_per_second": 9812.0,
    "boundary_rate": 0.3031,
    "phase": "1/3 fixed",
    "eta_seconds": 112.0,
}


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def read_lines(file: Path) -> list[dict[str, object]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in file.read_text().splitlines()]


def test_train_line_shows_every_number_once_in_order() -> None:
    line = format_train_line(120, 700, TRAIN_VALUES)
    words = "step 120/700 loss 2.5000 bpb 3.481 grad 0.84 lr 1.9e-03 seg 0.303 phase 1/3 fixed 9.8 kB/s eta 1:52"
    assert " ".join(line.split()) == words


def test_train_line_shows_mfu_and_memory_where_known() -> None:
    line = format_train_line(120, 700, {**TRAIN_VALUES, "mfu": 0.4123, "memory_gib": 70.26})
    assert "  mfu 41.2%  mem 70.3 GiB  " in line


def test_train_line_of_a_model_without_boundaries_has_no_boundary_columns() -> None:
    values = {key: value for key, value in TRAIN_VALUES.items() if key not in ("boundary_rate", "phase")}
    line = format_train_line(120, 700, values)
    assert "seg" not in line
    assert "phase" not in line
    assert "loss 2.5" in line.replace("  ", " ")


def test_train_lines_are_aligned() -> None:
    large = {**TRAIN_VALUES, "loss": 11.25, "grad_norm": 123456.0, "bytes_per_second": 123.4e6}
    lines = [format_train_line(7, 700, TRAIN_VALUES), format_train_line(70, 700, large)]
    assert len({line.index("eta") for line in lines}) == 1


def test_train_line_leaves_out_a_rate_that_is_not_known_but_shows_a_loss_that_is_nan() -> None:
    unknown = {"bytes_per_second": math.nan, "eta_seconds": math.nan, "loss": math.nan}
    line = format_train_line(1, 700, {**TRAIN_VALUES, **unknown})
    assert "B/s" not in line
    assert "eta" not in line
    assert line.split()[2:4] == ["loss", "nan"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.6, "1:00"), (112, "1:52"), (3599.6, "1:00:00"), (10912, "3:01:52"), (183712, "2d 03:01:52")],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (0, "0 B/s"),
        (999.4, "999 B/s"),
        (999.5, "1.0 kB/s"),
        (9812, "9.8 kB/s"),
        (99_960, "100 kB/s"),
        (999_700, "1.0 MB/s"),
        (2.5e9, "2.5 GB/s"),
        (4.2e13, "42000 GB/s"),
    ],
)
def test_byte_rates(rate: float, text: str) -> None:
    assert format_byte_rate(rate).strip() == text


def test_jsonl_holds_one_object_a_step_with_all_keys_and_values(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    metrics = MetricsLogger(file, total_steps=700)
    metrics.log_train(10, {**TRAIN_VALUES, "dropped_share": 0.25})
    assert read_lines(file) == [{"step": 10, **TRAIN_VALUES, "dropped_share": 0.25}]
    metrics.log_validation(10, {"validation_bpb": 3.25, "validation_bpb/english": 3.0})
    assert read_lines(file)[1:] == [{"step": 10, "validation_bpb": 3.25, "validation_bpb/english": 3.0}]


def test_jsonl_stays_json_when_numbers_are_not_finite(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    MetricsLogger(file, total_steps=700).log_train(1, {**TRAIN_VALUES, "loss": math.nan, "grad_norm": math.inf})
    (line,) = read_lines(file)
    assert line["loss"] is None
    assert line["grad_norm"] is None
    assert line["bpb"] == TRAIN_VALUES["bpb"]


def test_jsonl_keys_of_a_model_without_boundaries_are_null(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    values = {key: value for key, value in TRAIN_VALUES.items() if key not in ("boundary_rate", "phase")}
    MetricsLogger(file, total_steps=700).log_train(1, values)
    assert read_lines(file) == [{"step": 1, **values, "boundary_rate": None, "phase": None}]


def test_a_missing_key_is_a_fault_of_the_caller(tmp_path: Path) -> None:
    values = {key: value for key, value in TRAIN_VALUES.items() if key != "bytes_seen"}
    with pytest.raises(AssertionError, match="bytes_seen"):
        MetricsLogger(tmp_path / "metrics.jsonl", total_steps=700).log_train(1, values)


def test_a_full_disk_is_one_clear_line() -> None:
    metrics = MetricsLogger(Path("/dev/full"), total_steps=700)
    with pytest.raises(
        DiskError, match=r"cannot write /dev/full: No space left on device; .*job\.dump_folder"
    ) as caught:
        metrics.log_train(1, TRAIN_VALUES)
    assert "\n" not in str(caught.value)


def test_console_lines_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = MetricsLogger(tmp_path / "metrics.jsonl", total_steps=700)
    with caplog.at_level(logging.INFO, logger="spider_titan"):
        metrics.log_train(120, TRAIN_VALUES)
        metrics.log_validation(120, {"validation_bpb": 3.25, "validation_bpb/english": 3.0})
    train_line, validation_line = caplog.messages
    assert train_line == format_train_line(120, 700, TRAIN_VALUES)
    assert " ".join(validation_line.split()) == "step 120/700 validation bpb 3.2500 english 3.0000"


def test_tensorboard_has_the_same_numbers_under_their_groups(tmp_path: Path) -> None:
    metrics = MetricsLogger(tmp_path / "metrics.jsonl", total_steps=700, tensorboard_folder=tmp_path / "tb")
    extra = {"lr/engram": 9.5e-3, "dropped_share": 0.25, "hidden_norm/loop_1": 4.0}
    metrics.log_train(10, {**TRAIN_VALUES, **extra})
    metrics.log_train(20, {**TRAIN_VALUES, "loss": 2.25, "phase": "2/3 adaptive"})
    metrics.log_validation(20, {"validation_bpb": 3.25})
    metrics.close()

    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    curves = {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert curves["loss/total"] == [(10, 2.5), (20, 2.25)]
    assert curves["boundary/rate"] == [(10, pytest.approx(0.3031)), (20, pytest.approx(0.3031))]
    assert curves["optim/lr/engram"] == [(10, pytest.approx(9.5e-3))]
    assert curves["model/dropped_share"] == [(10, 0.25)]
    assert curves["model/hidden_norm/loop_1"] == [(10, 4.0)]
    assert curves["validation/bpb"] == [(20, 3.25)]
    assert {"loss/lm", "loss/bpb", "optim/grad_norm", "optim/lr", "throughput/bytes_per_second"} <= set(curves)
    (phase_tag,) = [tag for tag in events.Tags()["tensors"] if "phase" in tag]
    assert [point.step for point in events.Tensors(phase_tag)] == [10, 20]


def test_without_a_tensorboard_folder_only_the_json_file_is_written(tmp_path: Path) -> None:
    metrics = MetricsLogger(tmp_path / "metrics.jsonl", total_steps=700)
    metrics.log_train(10, TRAIN_VALUES)
    metrics.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_log_freq_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"metrics\.log_freq = 0"):
        MetricsConfig(log_freq=0)


def test_rate_leaves_out_the_first_step() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    clock.now += 60.0
    meter.count(1_000_000)
    for _ in range(9):
        clock.now += 2.0
        meter.count(100)
    lap = meter.lap()
    assert lap.bytes_per_second == pytest.approx(50.0)
    assert lap.seconds_per_step == pytest.approx(2.0)


def test_flops_are_counted_as_bytes_are() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    meter.count(100, 1e15)
    for flops in (1e9, 3e9):
        clock.now += 2.0
        meter.count(100, flops)
    assert meter.lap().flops_per_second == pytest.approx(1e9)
    clock.now += 1.0
    meter.count(100, 5e9)
    assert meter.lap().flops_per_second == pytest.approx(5e9)


def test_rate_is_not_known_after_the_first_step_and_the_interval_goes_on() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    clock.now += 60.0
    meter.count(100)
    clock.now += 1.0
    assert math.isnan(meter.lap().bytes_per_second)
    clock.now += 3.0
    meter.count(100)
    assert meter.lap().bytes_per_second == pytest.approx(25.0)


def test_every_lap_has_its_own_interval() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    meter.count(100)
    clock.now += 1.0
    meter.count(100)
    assert meter.lap().bytes_per_second == pytest.approx(100.0)
    for _ in range(2):
        clock.now += 4.0
        meter.count(200)
    lap = meter.lap()
    assert lap.bytes_per_second == pytest.approx(50.0)
    assert lap.seconds_per_step == pytest.approx(4.0)


def test_rate_leaves_out_pauses_even_one_that_fails() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    with meter.paused():
        clock.now += 500.0
    meter.count(100)
    clock.now += 1.0
    with meter.paused():
        clock.now += 30.0
    with pytest.raises(OSError, match="broken"), meter.paused():
        clock.now += 7.0
        raise OSError("broken")
    clock.now += 1.0
    meter.count(100)
    assert meter.lap().bytes_per_second == pytest.approx(50.0)


def test_what_the_device_is_still_doing_is_no_part_of_a_pause() -> None:
    clock = Clock()
    queued = 0.0

    def wait_for_device() -> None:
        nonlocal queued
        clock.now, queued = clock.now + queued, 0.0

    meter = RateMeter(clock, wait_for_device)
    meter.count(100)
    meter.count(100)
    queued = 4.0
    with meter.paused():
        wait_for_device()
        clock.now += 30.0
    assert meter.lap().bytes_per_second == pytest.approx(25.0)
