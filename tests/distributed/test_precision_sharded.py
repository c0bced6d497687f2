"""mxfp8 on two ranks against one process, and ranks whose devices differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spider_titan.distributed import World
from spider_titan.plugins import capability
from spider_titan.plugins.capability import Hardware, resolve
from spider_titan.plugins.precision import PrecisionConfig
from spider_titan.spec import StepContext, get_model_spec

from .ranks import TINY_SPIDER, build_sharded, full_grads, full_state, join, random_batch, rows_of, saved, spawn

SPEC = get_model_spec("spider")
SIZES = {**TINY_SPIDER, "q_lora_rank": 32, "qk_nope_head_dim": 8, "num_loops": 2}
CONTEXT = StepContext(num_targets=4 * 40, boundary_mode="topk", boundary_phase="fixed", max_boundary_rate=0.34)
MXFP8 = PrecisionConfig(mode="mxfp8", emulate=True)
# What a rank is told of its device, in turn: the second is the lesser one.
DEVICES = (
    Hardware("cuda", "L40", (8, 9), bf16_products=True),
    Hardware("cuda", "A100", (8, 0), bf16_products=True),
)


def measure(world: World, num_parts: int) -> dict[str, Any]:
    """Initial weights and gradients; a process alone takes the ranks' rows one after another."""
    model = build_sharded(SPEC, SPEC.config_class(**SIZES), world, precision=MXFP8)
    weights = full_state(model)
    for part in range(num_parts):
        rank = world.rank if world.size > 1 else part
        SPEC.loss(model, rows_of(random_batch(), rank, 2), CONTEXT).total.backward()
    return {"weights": weights, "grads": full_grads(model)}


def modes_on_unlike_devices(world: World) -> list[str]:
    capability.probe = lambda mesh: DEVICES[world.rank]
    found = [resolve(PrecisionConfig(mode=mode), world.mesh).mode for mode in ("auto", "fp8_dynamic")]  # type: ignore[arg-type]
    try:
        resolve(PrecisionConfig(mode="fp8_dynamic", strict=True), world.mesh)
    except ValueError as error:
        found.append(str(error))
    return found


def run_rank(rank: int, folder: str) -> None:
    with join() as world:
        result = {**measure(world, 1), "modes": modes_on_unlike_devices(world)}
    torch.save(result, Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = str(tmp_path_factory.mktemp("mxfp8"))
    spawn(2, run_rank, folder)
    return [saved(folder, rank) for rank in range(2)]


def test_weights_and_gradients_are_those_of_one_process(results: list[dict[str, Any]]) -> None:
    with join() as world:
        expected = measure(world, 2)
    for result in results:
        assert result["weights"].keys() == expected["weights"].keys()
        for name, value in expected["weights"].items():
            assert torch.equal(result["weights"][name], value), name
        assert result["grads"].keys() == expected["grads"].keys()
        for name, value in expected["grads"].items():
            assert_near(result["grads"][name], value, name)


def assert_near(found: Tensor, expected: Tensor, name: str) -> None:
    """Ranks add gradients in fp32; the process alone adds bf16 gradients of two backward passes, in fp32 too."""
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8, msg=name)


def test_ranks_with_unlike_devices_take_what_all_can_run(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["modes"][:2] == ["bf16", "bf16"]
        assert "A100 has 8.0" in result["modes"][2]
