"""Lazy tables and 8-bit averages on shards: the same as in one process, and restored at another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from spider_titan.distributed import World
from spider_titan.optim import GroupedAdamW, LRSchedulerConfig, OptimizerConfig
from spider_titan.plugins.fsdp import placement_rule
from spider_titan.spec import ParamGroup

from .ranks import full, join, saved, spawn

STEPS = 4
CONFIG = OptimizerConfig(name="adamw8bit", lr=0.01)
# Norms are summed in another order on shards; a factor that differed in its last bit would move codes.
NO_BOUND = 1e6
SCHEDULE = LRSchedulerConfig(warmup_steps=1)
# On two ranks: even and uneven rows, stacks sharded on dim 0 and on dim 1, a rank without rows; one stays in fp32.
SHAPES = {
    "even": (16, 256),
    "uneven": (17, 512),
    "stack": (4, 8, 256),
    "cut": (3, 8, 256),
    "thin": (1, 4096),
    "narrow": (65, 64),
}
TABLE = (31, 8)


class Matrices(nn.Module):
    """Parameters for an optimizer; computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(TABLE))
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.zeros(shape)))


def values(name: str, shape: torch.Size, step: int) -> Tensor:
    """Initial weights (step -1) or gradients; of the table's, few rows are not zero."""
    order = ["table", *SHAPES].index(name)
    generator = torch.Generator().manual_seed(1000 * (step + 1) + order)
    value = torch.randn(shape, generator=generator)
    if name == "table" and step >= 0:
        value *= torch.rand(shape[0], 1, generator=generator) < 0.2
    return value


def spread(value: Tensor, like: Tensor) -> Tensor:
    """``value`` in the shards of ``like``."""
    if isinstance(like, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value


def build(world: World) -> tuple[nn.Module, GroupedAdamW]:
    model = Matrices()
    fully_shard(model, mesh=world.mesh, shard_placement_fn=placement_rule(world.size))
    parameters = dict(model.named_parameters())
    groups = [
        ParamGroup("matrices", {name: parameters[name] for name in SHAPES}),
        ParamGroup("tables", {"table": parameters["table"]}, weight_decay=False, lazy_rows=True),
    ]
    for name, parameter in parameters.items():
        with torch.no_grad():
            parameter.copy_(spread(values(name, parameter.shape, -1), parameter))
    return model, GroupedAdamW(groups, CONFIG, SCHEDULE, STEPS, world.sum_over_shards)


def train(model: nn.Module, optimizer: GroupedAdamW, steps: range) -> list[Tensor]:
    """Gradient norms."""
    norms = []
    for step in steps:
        for name, parameter in model.named_parameters():
            parameter.grad = spread(values(name, parameter.shape, step), parameter)
        norms.append(torch.stack([*optimizer.clip(NO_BOUND).values()]))
        optimizer.step(step)
        optimizer.zero_grad()
    return norms


def everything(model: nn.Module, optimizer: GroupedAdamW) -> dict[str, Tensor]:
    """Whole weights and whole state."""
    tensors = {**dict(model.named_parameters()), **optimizer.state_tensors()}
    return {name: full(value).detach().clone() for name, value in tensors.items()}


def restore(world: World, snapshot: dict[str, Tensor]) -> tuple[nn.Module, GroupedAdamW]:
    model, optimizer = build(world)
    state = optimizer.allocate_state([name for name in snapshot if "." in name])
    for name, value in {**dict(model.named_parameters()), **state}.items():
        with torch.no_grad():
            value.copy_(spread(snapshot[name], value))
    return model, optimizer


def scenario(world: World, snapshot: dict[str, Tensor] | None) -> dict[str, Any]:
    """A run, its state half way, and the same run gone on with from a snapshot."""
    model, optimizer = build(world)
    norms = train(model, optimizer, range(2))
    half = everything(model, optimizer)
    norms += train(model, optimizer, range(2, STEPS))
    result = {"half": half, "end": everything(model, optimizer), "norms": norms}
    model, optimizer = restore(world, snapshot or half)
    train(model, optimizer, range(2, STEPS))
    return {**result, "resumed": everything(model, optimizer)}


def run_rank(rank: int, folder: str) -> None:
    snapshot = torch.load(Path(folder) / "single.pt", weights_only=True)["half"]
    # Compiling the update takes longer than all else.
    with torch.compiler.set_stance("force_eager"), join() as world:
        torch.save(scenario(world, snapshot), Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of one process, then of two ranks."""
    folder = tmp_path_factory.mktemp("optim")
    with torch.compiler.set_stance("force_eager"), join() as world:
        single = scenario(world, None)
    torch.save(single, folder / "single.pt")
    spawn(2, run_rank, str(folder))
    return [single, *(saved(str(folder), rank) for rank in range(2))]


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To the last bit but for the table and what stays in fp32, whose kernels may vectorise a shard differently."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].shape == value.shape and found[name].dtype == value.dtype
        if value.dtype == torch.uint8:
            assert torch.equal(found[name], value), name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=name)


def test_two_ranks_do_what_one_does(results: list[dict[str, Any]]) -> None:
    single, *ranks = results
    assert {name.split(".")[0] for name in single["end"] if name.endswith("exp_avg_codes")} == SHAPES.keys() - {
        "narrow"
    }
    for result in ranks:
        for found, expected in zip(result["norms"], single["norms"], strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
        assert_near(result["end"], single["end"])


def test_the_snapshot_of_one_rank_goes_on_at_two(results: list[dict[str, Any]]) -> None:
    single, *ranks = results
    for name, value in single["end"].items():
        assert torch.equal(single["resumed"][name], value), name
    for result in ranks:
        assert_near(result["resumed"], single["end"])


def test_rows_that_no_step_hit_keep_their_weights(results: list[dict[str, Any]]) -> None:
    gradients = [values("table", torch.Size(TABLE), step) for step in range(STEPS)]
    hit = torch.stack([(gradient != 0).any(1) for gradient in gradients]).any(0)
    assert 0 < int(hit.sum()) < TABLE[0]
    initial = values("table", torch.Size(TABLE), -1)
    for result in results:
        table = result["end"]["table"]
        assert torch.equal((table != initial).any(1), hit)
        assert torch.equal((result["end"]["table.exp_avg"] != 0).any(1), hit)
