"""Activation checkpointing: the most memory that a step's forward and backward hold, and what they take, in each mode.

Memory is what torch's allocator reports of every block it gives out and takes back: exact, and the same in every run.
It is counted from before the forward, with weights and without gradients, to after the backward; so the gradients are a
part of it, and are all that is left at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import tyro
from timing import medians, print_table, relative_difference, start
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from spider_titan.distributed import CommConfig, ParallelismConfig, join_world
from spider_titan.models.common.init import clean_fqn
from spider_titan.plugins import PluginContext, activation_checkpoint
from spider_titan.plugins.activation_checkpoint import ActivationCheckpointConfig
from spider_titan.spec import Batch, ModelSpec, StepContext, get_model_spec

MODES = ("none", "selective", "full")


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that torch's allocator held during ``run`` on top of those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def steps(spec: ModelSpec, config: Any, batch: Batch) -> tuple[dict[str, Callable[[], None]], dict[str, nn.Module]]:
    """A forward and backward in each mode, and the models; all have the same weights."""
    context = StepContext(batch.targets.numel(), "topk", "fixed", max_boundary_rate=0.34)
    models: dict[str, nn.Module] = {}
    runs: dict[str, Callable[[], None]] = {}
    with join_world(ParallelismConfig(), CommConfig()) as world:
        for mode in MODES:
            model = spec.build(config, device="cpu").train()
            plugins = PluginContext(world.mesh, activation_checkpoint=ActivationCheckpointConfig(mode=mode))
            models[mode] = activation_checkpoint.apply(model, spec, plugins)

            def run(model: nn.Module = models[mode]) -> None:
                model.zero_grad()
                spec.loss(model, batch, context).total.backward()

            runs[mode] = run
    return runs, models


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """By name; those of zero say nothing and are left out."""
    named = {clean_fqn(name): parameter.grad for name, parameter in model.named_parameters()}
    return {name: grad for name, grad in named.items() if grad is not None and grad.any()}


def measure(spec: ModelSpec, config: Any, batch: Batch, repetitions: int) -> list[str]:
    """One row of the table."""
    runs, models = steps(spec, config, batch)
    peaks = {}
    for mode, run in runs.items():
        # The first backward also makes what stays.
        run()
        models[mode].zero_grad()
        peaks[mode] = peak_bytes(run)
    seconds = medians(runs, repetitions=repetitions)
    plain, others = gradients(models["none"]), [gradients(models[mode]) for mode in MODES[1:]]
    difference = max(relative_difference(other[name], grad) for other in others for name, grad in plain.items())
    return [
        str(getattr(config, "num_loops", 1)),
        *(f"{peaks[mode] / 2**20:.1f}" for mode in MODES),
        *(f"{peaks[mode] / peaks['none']:.2f}" for mode in MODES[1:]),
        *(f"{seconds[mode] / seconds['none']:.2f}" for mode in MODES[1:]),
        f"{difference:.0e}",
    ]


def main(
    flavor: str = "debug",
    loops: tuple[int, ...] = (2, 6),
    rows: int = 4,
    seq_len: int = 512,
    repetitions: int = 5,
    threads: int = 1,
) -> None:
    """Measures Spider with several numbers of loops.

    Args:
        flavor: Whose sizes it has.
        loops: T.
        rows: Rows of a micro-batch.
        seq_len: Bytes a row.
        repetitions: Steps of each mode and T.
        threads: CPU threads.
    """
    start(
        f"Spider {flavor}, {rows} rows of {seq_len} bytes, forward and backward",
        threads=threads,
        repetitions=repetitions,
    )
    torch.manual_seed(0)
    spec = get_model_spec("spider")
    ids = torch.randint(0, 256, (rows, seq_len + 1))
    batch = Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
    table = [measure(spec, replace(spec.flavors[flavor], num_loops=count), batch, repetitions) for count in loops]
    head = ["T", *(f"{mode} MiB" for mode in MODES), "selective / none", "full / none"]
    print_table([*head, "selective time", "full time", "gradients, relative"], table)


if __name__ == "__main__":
    tyro.cli(main)
