"""The estimate of activation memory against the allocations of a real step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from spider_titan.activation_memory import LiveMemory, estimate_activations, in_compute_dtype
from spider_titan.distributed import ParallelismConfig, World, imagine_world
from spider_titan.plugins import PluginContext, activation_checkpoint
from spider_titan.plugins.activation_checkpoint import ActivationCheckpointConfig
from spider_titan.plugins.precision import PrecisionConfig
from spider_titan.spec import Batch, StepContext, get_model_spec

ROWS, LENGTH, RATE = 4, 256, 0.45


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with imagine_world(ParallelismConfig(), 1) as world:
        yield world


def measured_peak(model: nn.Module, name: str, tmp_path: Path) -> int:
    """The most bytes that torch's allocator held beyond those at the start, as its own records say."""
    spec = get_model_spec(name)
    ids = torch.randint(0, 256, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    step = StepContext(ROWS * LENGTH, boundary_phase="fixed", max_boundary_rate=RATE)
    spec.loss(model, Batch(ids, ids), step).total.backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        spec.loss(model, Batch(ids, ids), step).total.backward()
    path = tmp_path / "trace.json"
    recorded.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize(
    ("name", "mode", "dtype"),
    [
        ("spider", "none", "fp32"),
        ("spider", "selective", "fp32"),
        ("spider", "full", "fp32"),
        ("byte_transformer", "none", "bf16"),
        ("byte_transformer", "none", "fp32"),
    ],
)
def test_the_estimate_is_what_a_step_allocates(name: str, mode: Any, dtype: Any, world: World, tmp_path: Path) -> None:
    spec = get_model_spec(name)
    config = spec.flavors["debug"]
    context = PluginContext(
        world.mesh,
        precision=PrecisionConfig(mode=dtype),
        activation_checkpoint=ActivationCheckpointConfig(mode=mode),
    )
    estimate = estimate_activations(spec, config, context, rows=ROWS, seq_len=LENGTH, max_boundary_rate=RATE)
    model = in_compute_dtype(spec.build(config), spec, context.precision.compute_dtype).train()
    measured = measured_peak(activation_checkpoint.apply(model, spec, context), name, tmp_path)
    assert measured / 1.5 <= estimate <= measured * 1.5


def test_what_lives_is_counted_once_and_let_go() -> None:
    memory = LiveMemory()
    with memory:
        first = torch.empty(100, device="meta")
        view = first.view(10, 10).t()
        second = first + 1
        assert memory.live == 800
        del first
        assert memory.live == 800, "a view keeps its storage"
        del view
        assert memory.live == 400
        second.mul_(2)
    assert memory.live == 400
    assert memory.peak == 800
    del second
    assert memory.live == 0
