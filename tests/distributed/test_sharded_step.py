"""Two ranks against one process: the same weights at first, the same loss and gradients from halves of the batch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch.distributed.tensor import DTensor

from spider_titan.distributed import CommConfig, ParallelismConfig, join_world
from spider_titan.plugins import PluginContext, apply_plugins
from spider_titan.spec import Batch, StepContext, get_model_spec

pytestmark = pytest.mark.distributed

WORLD_SIZE = 2
SIZES: dict[str, dict[str, Any]] = {
    "spider": {"hidden_size": 32, "intermediate_size": 32, "expert_rank": 8, "engram_slots": 64, "num_experts": 3},
    "byte_transformer": {"hidden_size": 32, "intermediate_size": 32, "num_layers": 2},
}
CONTEXT = StepContext(num_targets=4 * 40, boundary_mode="topk", boundary_phase="fixed", max_boundary_rate=0.34)


def make_batch() -> Batch:
    ids = torch.randint(0, 256, (4, 41), generator=torch.Generator().manual_seed(1))
    ids[1, 10:12] = torch.tensor([258, 257])
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def run_rank(rank: int, name: str, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    spec = get_model_spec(name)
    with join_world(ParallelismConfig(), CommConfig()) as world:
        model = spec.build(spec.config_class(**SIZES[name]), device="meta")
        model = apply_plugins(model, spec, PluginContext(world.mesh))
        model.to_empty(device=world.device)
        spec.init_weights(model, 3)
        weights = {key: full(value).clone() for key, value in model.state_dict().items()}
        batch = make_batch()
        half = slice(rank * 2, rank * 2 + 2)
        terms = spec.loss(model, Batch(batch.input_ids[half], batch.targets[half]), CONTEXT)
        terms.total.backward()
        grads = {key: full(value.grad) for key, value in model.named_parameters() if value.grad is not None}
        sums = world.sum_over_ranks(terms.sums)
        torch.save({"weights": weights, "grads": grads, "sums": sums}, Path(folder) / f"{rank}.pt")


@pytest.mark.parametrize("name", SIZES)
def test_two_ranks_equal_one_process(name: str, tmp_path: Path, free_port: int) -> None:
    torch.multiprocessing.spawn(run_rank, args=(name, free_port, str(tmp_path)), nprocs=WORLD_SIZE)
    spec = get_model_spec(name)
    plain = spec.build(spec.config_class(**SIZES[name]), seed=3)
    weights = {key: value.clone() for key, value in plain.state_dict().items()}
    terms = spec.loss(plain, make_batch(), CONTEXT)
    terms.total.backward()
    expected = {key: value.grad for key, value in plain.named_parameters() if value.grad is not None}
    for rank in range(WORLD_SIZE):
        result = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert result["weights"].keys() == weights.keys()
        for key, value in weights.items():
            assert torch.equal(result["weights"][key], value), key
        assert result["grads"].keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(result["grads"][key], value, rtol=1e-4, atol=1e-6, msg=key)
        for key, value in terms.sums.items():
            torch.testing.assert_close(result["sums"][key], value, rtol=1e-5, atol=1e-6, msg=key)
