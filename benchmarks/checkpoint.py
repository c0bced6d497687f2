"""How long training waits for a save: async against sync, side by side, on a model of some size.

    python benchmarks/checkpoint.py [--hidden 256] [--rounds 5]

Prints the seconds that ``save`` keeps the trainer from its next step, their ratio, and the share of a run that saves
every N steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Literal

import torch

from spider_titan.checkpoint.config import CheckpointConfig
from spider_titan.checkpoint.manager import CheckpointManager
from spider_titan.checkpoint.training import Progress, snapshot
from spider_titan.distributed import CommConfig, ParallelismConfig, World, join_world
from spider_titan.optim import GroupedAdamW, LRSchedulerConfig, OptimizerConfig
from spider_titan.plugins import PluginContext, apply_plugins, materialize
from spider_titan.spec import Batch, StepContext, get_model_spec

MODES: tuple[Literal["disabled", "async"], ...] = ("disabled", "async")
EVERY = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256, help="hidden size of the model")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind; the median counts")
    options = parser.parse_args()
    with join_world(ParallelismConfig(), CommConfig()) as world, tempfile.TemporaryDirectory() as folder:
        measure(world, Path(folder), options.hidden, options.rounds)


def measure(world: World, folder: Path, hidden: int, rounds: int) -> None:
    spec = get_model_spec("spider")
    config = spec.config_class(hidden_size=hidden, intermediate_size=2 * hidden)
    context = PluginContext(world.mesh)
    model = apply_plugins(spec.build(config, device="meta"), spec, context)
    materialize(model, context, world.device)
    spec.init_weights(model, 0)
    optimizer = GroupedAdamW(
        spec.param_groups(model), OptimizerConfig(), LRSchedulerConfig(0), 1000, world.sum_over_shards
    )
    ids = torch.randint(0, 256, (8, 256))
    batch = Batch(ids, ids)

    def step() -> float:
        begin = time.perf_counter()
        spec.loss(model, batch, StepContext(batch.num_targets)).total.backward()
        optimizer.clip(1.0)
        optimizer.step(0)
        optimizer.zero_grad()
        return time.perf_counter() - begin

    step()
    managers = {
        mode: CheckpointManager(folder / mode, CheckpointConfig(enable=True, async_mode=mode), world, "")
        for mode in MODES
    }
    waits: dict[str, list[float]] = {mode: [] for mode in MODES}
    steps: list[float] = []
    for number in range(1, rounds + 1):
        for mode, manager in managers.items():
            begin = time.perf_counter()
            manager.save(snapshot(Progress(1, {}, step=number), model, optimizer, world))
            waits[mode].append(time.perf_counter() - begin)
            manager.wait()
            steps.append(step())
    for manager in managers.values():
        manager.close()
    size = sum(file.stat().st_size for file in (folder / "async" / f"step-{rounds}").iterdir())
    sync, background = (statistics.median(waits[mode]) for mode in MODES)
    seconds = statistics.median(steps)
    print(f"checkpoint of {size / 1e6:.1f} MB, step of {seconds:.3f} s")
    for mode, wait in zip(MODES, (sync, background), strict=True):
        share = wait / (EVERY * seconds + wait)
        print(f"{mode:9s} training waits {wait:.3f} s; {share:.2%} of a run that saves every {EVERY} steps")
    print(f"ratio async / sync: {background / sync:.2f}")


if __name__ == "__main__":
    main()
