"""Weights gathered as float8 on two ranks: half the bytes, and the same arithmetic as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spider_titan.models.common.init import copy_full_
from spider_titan.plugins import PluginContext, after_step
from spider_titan.plugins.precision import PrecisionConfig
from spider_titan.spec import Batch, StepContext, get_model_spec

from .ranks import (
    TINY_SPIDER,
    CountCollectives,
    build_sharded,
    full,
    full_grads,
    full_state,
    join,
    random_batch,
    rows_of,
    saved,
    spawn,
)

WORLD_SIZE = 2
STEPS = 3
CONTEXT = StepContext(num_targets=4 * 40, boundary_mode="topk", boundary_phase="fixed", max_boundary_rate=0.34)
BYTE_TRANSFORMER: dict[str, Any] = {
    "hidden_size": 64,
    "num_heads": 2,
    "num_layers": 2,
    "intermediate_size": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
SIZES = {"byte_transformer": BYTE_TRANSFORMER, "spider": {**TINY_SPIDER, "qk_nope_head_dim": 24}}
BF16 = PrecisionConfig(mode="bf16")
PLAIN = PrecisionConfig(mode="fp8_dynamic", fp8_recipe="tensorwise", emulate=True)
GATHERED = PrecisionConfig(mode="fp8_dynamic", fp8_recipe="tensorwise", emulate=True, fp8_all_gather=True)


def build(name: str, world: Any, precision: PrecisionConfig) -> nn.Module:
    spec = get_model_spec(name)
    return build_sharded(spec, spec.config_class(**SIZES[name]), world, precision=precision)


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Makes every weight one that bf16 holds, so that it does not matter whether it passes through bf16."""
    for parameter in model.parameters():
        copy_full_(parameter, full(parameter).bfloat16().float())


def gradients(name: str, model: nn.Module, batches: list[Batch]) -> dict[str, Tensor]:
    for batch in batches:
        get_model_spec(name).loss(model, batch, CONTEXT).total.backward()
    return full_grads(model)


def train(name: str, world: Any, model: nn.Module, *, precompute: bool) -> tuple[list[float], list[int]]:
    """Losses and all-reduces of each step's forward and backward."""
    spec, optimizer = get_model_spec(name), torch.optim.SGD(model.parameters(), lr=0.5)
    losses, all_reduces = [], []
    for _ in range(STEPS):
        with CountCollectives() as counted:
            terms = spec.loss(model, rows_of(random_batch(), world.rank, world.size), CONTEXT)
            terms.total.backward()
        all_reduces.append(counted.calls["all_reduces"])
        losses.append(float(world.sum_over_ranks({"loss": terms.total})["loss"]))
        optimizer.step()
        optimizer.zero_grad()
        if precompute:
            after_step(model, PluginContext(world.mesh, precision=GATHERED))
    return losses, all_reduces


def gathered_bytes(name: str, world: Any, precision: PrecisionConfig) -> dict[str, int]:
    """All-gathers of a forward and backward, and their bytes."""
    model = build(name, world, precision)
    with CountCollectives() as counted:
        get_model_spec(name).loss(model, rows_of(random_batch(), world.rank, world.size), CONTEXT).total.backward()
    return {"bytes": counted.gathered_bytes, "gathers": counted.calls["all_gathers"]}


def run_rank(rank: int, folder: str) -> None:
    results: dict[str, Any] = {}
    with join() as world:
        for name in SIZES:
            model = build(name, world, GATHERED)
            results[f"{name} weights"] = full_state(model)
            round_weights(model)
            results[f"{name} gradients"] = gradients(name, model, [rows_of(random_batch(), rank, WORLD_SIZE)])
            for precompute in (False, True):
                results[f"{name} {precompute}"] = train(
                    name, world, build(name, world, GATHERED), precompute=precompute
                )
            for key, precision in {"bf16": BF16, "float8": GATHERED}.items():
                results[f"{name} {key}"] = gathered_bytes(name, world, precision)
    torch.save(results, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = str(tmp_path_factory.mktemp("float8"))
    spawn(WORLD_SIZE, run_rank, folder)
    return [saved(folder, rank) for rank in range(WORLD_SIZE)]


@pytest.mark.parametrize("name", SIZES)
def test_initial_weights_are_those_of_one_process(name: str, results: list[dict[str, Any]]) -> None:
    spec = get_model_spec(name)
    expected = spec.build(spec.config_class(**SIZES[name]), seed=3).state_dict()
    for result in results:
        weights = result[f"{name} weights"]
        assert weights.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(weights[key], value), key


@pytest.mark.parametrize("name", SIZES)
def test_gradients_are_those_of_one_process_without(name: str, results: list[dict[str, Any]]) -> None:
    """One process takes the ranks' rows one after another: a tensorwise scale is that of the rows computed at once."""
    batch = random_batch()
    with join() as world:
        model = build(name, world, PLAIN)
        round_weights(model)
        expected = gradients(name, model, [rows_of(batch, rank, WORLD_SIZE) for rank in range(WORLD_SIZE)])
    for result in results:
        found = result[f"{name} gradients"]
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-8, msg=key)


@pytest.mark.parametrize("name", SIZES)
def test_scales_computed_beforehand_change_no_bit(name: str, results: list[dict[str, Any]]) -> None:
    for result in results:
        (losses, all_reduces), (precomputed_losses, precomputed) = result[f"{name} False"], result[f"{name} True"]
        assert precomputed_losses == losses
        assert len(set(losses)) == STEPS
        # The first step has no optimizer step before it.
        assert all_reduces[0] == precomputed[0] > 0
        assert all_reduces[1:] == all_reduces[:1] * (STEPS - 1)
        assert precomputed[1:] == [0] * (STEPS - 1)


def test_half_the_bytes_are_gathered(results: list[dict[str, Any]]) -> None:
    spec = get_model_spec("byte_transformer")
    model = spec.build(spec.config_class(**BYTE_TRANSFORMER), device="meta")
    blocks = sum(p.numel() for p in model.layers.parameters())
    matrices = sum(p.numel() for p in model.layers.parameters() if p.ndim == 2)
    root = sum(p.numel() for p in model.parameters()) - blocks
    last = sum(p.numel() for p in model.layers[-1].parameters())
    last_matrices = sum(p.numel() for p in model.layers[-1].parameters() if p.ndim == 2)
    for result in results:
        bf16, float8 = result["byte_transformer bf16"], result["byte_transformer float8"]
        # Blocks are gathered for the forward and for the backward; the root and the last block only once.
        assert bf16["bytes"] == 2 * (2 * blocks - last + root)
        assert bf16["bytes"] - float8["bytes"] == 2 * matrices - last_matrices
        assert bf16["gathers"] == float8["gathers"]
        in_blocks = {key: found["bytes"] - 2 * root for key, found in (("bf16", bf16), ("float8", float8))}
        assert in_blocks["float8"] / in_blocks["bf16"] == pytest.approx(0.5, abs=0.01)
