"""One step on two ranks against one process: gradients, collectives, uneven data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from spider_titan import dry_run
from spider_titan.distributed import ParallelismConfig, World
from spider_titan.optim import GroupedAdamW, LRSchedulerConfig, OptimizerConfig
from spider_titan.plugins import PluginContext
from spider_titan.spec import Batch, ModelSpec, StepContext, get_model_spec
from spider_titan.vocabulary import BOS_ID, EOS_ID, PAD_ID

from .ranks import (
    TINY_SPIDER,
    CountCollectives,
    build_sharded,
    full_grads,
    full_state,
    join,
    random_batch,
    rows_of,
    saved,
    spawn,
)

SIZES: dict[str, dict[str, Any]] = {
    "spider": {**TINY_SPIDER, "num_experts": 3},
    "byte_transformer": {"hidden_size": 32, "intermediate_size": 32, "num_layers": 2},
}
RESHARD = ("default", "always", "never")
LOOPS = (1, 6)


def uneven_batches() -> dict[str, Batch]:
    """Four rows of which each rank gets two that have nothing in common."""
    length = 40
    text = torch.randint(0, 256, (2, length + 1), generator=torch.Generator().manual_seed(2))
    closing = torch.full((2, length + 1), EOS_ID)
    letters = torch.full((2, length + 1), ord("a"))
    documents = torch.tensor([BOS_ID, EOS_ID] * (length // 2) + [BOS_ID]).expand(2, -1)

    def batch(first: torch.Tensor, second: torch.Tensor) -> Batch:
        rows = torch.cat((first, second))
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    no_target = batch(text, letters)
    no_target.targets[2:] = PAD_ID
    nothing = batch(text, torch.full_like(text, PAD_ID))
    return {
        "no boundary, one a byte": batch(letters, closing),
        "text, empty documents": batch(text, documents),
        "text, no valid target": no_target,
        "text, padding alone": nothing,
    }


def context_of(batch: Batch, **changes: Any) -> StepContext:
    settings: dict[str, Any] = {"boundary_mode": "topk", "boundary_phase": "fixed", "max_boundary_rate": 0.34}
    return StepContext(num_targets=batch.num_targets, **{**settings, **changes})


def step(spec: ModelSpec, model: Any, batch: Batch, context: StepContext) -> dict[str, torch.Tensor]:
    model.zero_grad()
    terms = spec.loss(model, batch, context)
    terms.total.backward()
    return terms.sums


def whole_step(spec: ModelSpec, model: Any, world: World, batch: Batch) -> CountCollectives:
    """A step as the trainer runs it, its collectives counted."""
    optimizer = GroupedAdamW(
        spec.param_groups(model), OptimizerConfig(), LRSchedulerConfig(0), 10, world.sum_over_shards
    )
    with CountCollectives() as counter:
        world.sum_over_ranks({"targets": torch.tensor(batch.num_targets)})
        sums = step(spec, model, rows_of(batch, world.rank, world.size), context_of(batch))
        optimizer.clip(1.0)
        optimizer.step(0)
        world.sum_over_ranks(sums)
    return counter


def run_rank(rank: int, folder: str) -> None:
    results: dict[str, Any] = {}
    with join() as world:
        for name, sizes in SIZES.items():
            spec = get_model_spec(name)
            model = build_sharded(spec, spec.config_class(**sizes), world)
            weights, batch = full_state(model), random_batch()
            sums = step(spec, model, rows_of(batch, rank, 2), context_of(batch))
            results[name] = {"weights": weights, "grads": full_grads(model), "sums": world.sum_over_ranks(sums)}
        spec = get_model_spec("spider")
        for case, batch in uneven_batches().items():
            model = build_sharded(spec, spec.config_class(**SIZES["spider"]), world)
            set_extremes(model)
            mode = {"boundary_mode": "threshold", "boundary_phase": "adaptive", "max_boundary_rate": 1.0}
            sums = step(spec, model, rows_of(batch, rank, 2), context_of(batch, **mode))
            results[case] = {"grads": full_grads(model), "sums": world.sum_over_ranks(sums)}
        for loops in LOOPS:
            for policy in RESHARD:
                parallelism = ParallelismConfig(fsdp_reshard_after_forward=policy)
                config = spec.config_class(**{**SIZES["spider"], "num_loops": loops, "backprop_loops": loops // 2})
                model = build_sharded(spec, config, world, parallelism=parallelism)
                counter = whole_step(spec, model, world, random_batch())
                units = dry_run.describe_units(model, spec, PluginContext(world.mesh, parallelism=parallelism))
                described = dry_run.count_collectives(units, world, micro_batches=1)
                results[f"{loops} loops, {policy}"] = {
                    "counted": dict(counter.calls),
                    "gathered_bytes": counter.gathered_bytes,
                    "described": vars(described),
                }
    torch.save(results, Path(folder) / f"{rank}.pt")


def set_extremes(model: Any) -> None:
    """No byte closes a segment of its own, and every segment goes to the experts 0 and 1."""
    model.boundary_predictor.bias.fill_(-30.0)
    for router in model.core.routers():
        router.balance_bias.copy_(torch.tensor([20.0, 10.0, 0.0]))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    spawn(2, run_rank, folder)
    return [saved(folder, rank) for rank in range(2)]


def assert_equal(result: dict[str, Any], model: Any, sums: dict[str, torch.Tensor]) -> None:
    expected = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    assert result["grads"].keys() == expected.keys()
    for key, value in expected.items():
        scale = float(value.abs().max())
        torch.testing.assert_close(result["grads"][key], value, rtol=1e-5, atol=1e-6 * max(scale, 1e-3), msg=key)
    for key, value in sums.items():
        torch.testing.assert_close(result["sums"][key], value.double(), rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", SIZES)
def test_two_ranks_equal_one_process(name: str, results: list[dict[str, Any]]) -> None:
    spec, batch = get_model_spec(name), random_batch()
    plain = spec.build(spec.config_class(**SIZES[name]), seed=3)
    weights = {key: value.clone() for key, value in plain.state_dict().items()}
    sums = step(spec, plain, batch, context_of(batch))
    for result in results:
        assert result[name]["weights"].keys() == weights.keys()
        for key, value in weights.items():
            assert torch.equal(result[name]["weights"][key], value), key
        assert_equal(result[name], plain, sums)


@pytest.mark.parametrize("case", uneven_batches())
def test_ranks_with_very_different_data(case: str, results: list[dict[str, Any]]) -> None:
    spec, batch = get_model_spec("spider"), uneven_batches()[case]
    plain: Any = spec.build(spec.config_class(**SIZES["spider"]), seed=3)
    set_extremes(plain)
    mode = {"boundary_mode": "threshold", "boundary_phase": "adaptive", "max_boundary_rate": 1.0}
    sums = step(spec, plain, batch, context_of(batch, **mode))
    for result in results:
        assert_equal(result[case], plain, sums)
        assert all(bool(grad.isfinite().all()) for grad in result[case]["grads"].values())
    if case == "no boundary, one a byte":
        assert int(sums["num_boundaries"]) == 2 * 40
    assert float(sums["expert_load"][..., 2].sum()) == 0


@pytest.mark.parametrize("policy", RESHARD)
@pytest.mark.parametrize("loops", LOOPS)
def test_collectives_are_those_that_a_dry_run_tells(loops: int, policy: str, results: list[dict[str, Any]]) -> None:
    for result in results:
        counted, described = (
            result[f"{loops} loops, {policy}"]["counted"],
            result[f"{loops} loops, {policy}"]["described"],
        )
        assert counted == {
            "all_gathers": described["all_gathers"],
            "reduce_scatters": described["reduce_scatters"],
            "all_reduces": described["scalar_all_reduces"] + described["gradient_all_reduces"],
        }


@pytest.mark.parametrize("policy", RESHARD)
def test_communication_does_not_grow_with_the_loops(policy: str, results: list[dict[str, Any]]) -> None:
    for result in results:
        few, many = (result[f"{loops} loops, {policy}"] for loops in LOOPS)
        assert few["counted"] == many["counted"]
        assert many["gathered_bytes"] < 1.05 * few["gathered_bytes"]
