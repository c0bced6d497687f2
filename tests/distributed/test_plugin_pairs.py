"""Every plugin setting on and off, alone and with every other, on two ranks: the losses of three steps."""

from __future__ import annotations

import itertools
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from spider_titan.distributed import ParallelismConfig
from spider_titan.optim import GroupedAdamW, LRSchedulerConfig, OptimizerConfig
from spider_titan.plugins import PluginContext, after_step
from spider_titan.plugins.activation_checkpoint import ActivationCheckpointConfig
from spider_titan.plugins.compile import CompileConfig
from spider_titan.plugins.precision import PrecisionConfig
from spider_titan.spec import StepContext, get_model_spec

from .ranks import TINY_SPIDER, build_sharded, join, random_batch, rows_of, saved, spawn

pytestmark = pytest.mark.slow

STEPS = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "selective": {"activation_checkpoint": ActivationCheckpointConfig(mode="selective")},
    "full": {"activation_checkpoint": ActivationCheckpointConfig(mode="full")},
    "compile": {"compile": CompileConfig(enable=True, backend="aot_eager")},
    "replicate": {"parallelism": ParallelismConfig(data_parallel_replicate_degree=2)},
    "always": {"parallelism": ParallelismConfig(fsdp_reshard_after_forward="always")},
    "never": {"parallelism": ParallelismConfig(fsdp_reshard_after_forward="never")},
    "offload": {"parallelism": ParallelismConfig(enable_cpu_offload=True)},
    "bf16": {"precision": PrecisionConfig(mode="bf16")},
    "rowwise": {"precision": PrecisionConfig(mode="fp8_dynamic", emulate=True)},
    "tensorwise": {"precision": PrecisionConfig(mode="fp8_dynamic", fp8_recipe="tensorwise", emulate=True)},
    "mxfp8": {"precision": PrecisionConfig(mode="mxfp8", emulate=True)},
    "float8 gather": {
        "precision": PrecisionConfig(mode="fp8_dynamic", fp8_recipe="tensorwise", fp8_all_gather=True, emulate=True)
    },
}
PRECISIONS = ("bf16", "rowwise", "tensorwise", "mxfp8", "float8 gather")


def compatible(first: str, second: str) -> bool:
    """Whether two settings can be on at once: precisions, and the two ways of checkpointing, exclude each other."""
    exclusive = (PRECISIONS, ("selective", "full"), ("always", "never"))
    return not any(first in group and second in group for group in exclusive)


PAIRS = [pair for pair in itertools.combinations(SETTINGS, 2) if compatible(*pair)]
CASES: list[tuple[str, ...]] = [(), *((name,) for name in SETTINGS), *PAIRS]


def merge(names: tuple[str, ...]) -> dict[str, Any]:
    """The sections of several settings; of two settings of one section, what differs from its default counts."""
    sections: dict[str, Any] = {}
    for name in names:
        for section, config in SETTINGS[name].items():
            if section in sections:
                changed = {
                    f.name: getattr(config, f.name) for f in fields(config) if getattr(config, f.name) != f.default
                }
                config = type(config)(**{**vars(sections[section]), **changed})
            sections[section] = config
    return sections


def losses(sections: dict[str, Any]) -> list[float]:
    parallelism = sections.get("parallelism", ParallelismConfig())
    spec, batch = get_model_spec("spider"), random_batch()
    with join(**vars(parallelism)) as world:
        model = build_sharded(spec, spec.config_class(**TINY_SPIDER), world, **sections)
        context = PluginContext(world.mesh, **sections)
        groups = spec.param_groups(model)
        optimizer = GroupedAdamW(groups, OptimizerConfig(lr=1e-3), LRSchedulerConfig(1), STEPS, world.sum_over_shards)
        found = []
        for step in range(STEPS):
            step_context = StepContext(batch.num_targets, "topk", "fixed", 0.34, optimizer.frozen_groups(step))
            terms = spec.loss(model, rows_of(batch, world.rank, world.size), step_context)
            terms.total.backward()
            optimizer.clip(1.0)
            optimizer.step(step)
            optimizer.zero_grad()
            after_step(model, context)
            totals = world.sum_over_ranks(terms.sums)
            spec.after_step(model, totals, step_context)
            found.append(float(totals["objective"]))
    return found


def run_rank(rank: int, folder: str) -> None:
    results = {}
    for names in CASES:
        torch._dynamo.reset()
        results["+".join(names)] = losses(merge(names))
    torch.save(results, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses of every case."""
    folder = str(tmp_path_factory.mktemp("pairs"))
    spawn(2, run_rank, folder)
    first, second = (saved(folder, rank) for rank in range(2))
    assert first == second
    return first


@pytest.mark.parametrize("names", CASES[1:], ids="+".join)
def test_settings_do_not_change_the_losses(names: tuple[str, ...], results: dict[str, list[float]]) -> None:
    precision = next((name for name in names if name in PRECISIONS), "")
    found, reference = results["+".join(names)], results[precision]
    if precision and len(names) > 1:
        # The same arithmetic in another order moves single roundings of bf16, which has 8 bits.
        assert found == pytest.approx(reference, rel=2**-9)
    elif precision:
        assert found == pytest.approx(results[""], rel=0.02)
        assert found != results[""]
    else:
        assert found == pytest.approx(reference, rel=2e-5)
    assert len({*found}) == STEPS
