"""Dry runs of all shipped configurations, at sizes that no machine here has."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.device_mesh import DeviceMesh

from spider_titan import dry_run
from spider_titan.config import JobConfig, load_config
from spider_titan.distributed import ParallelismConfig, imagine_world
from spider_titan.dry_run import Unit, count_collectives, describe_memory, describe_units, gathered_itemsize
from spider_titan.plugins import PluginContext, apply_plugins
from spider_titan.plugins.fsdp import placement_rule

CONFIGS = sorted((Path(__file__).parents[2] / "train_configs").glob("*.toml"))
RANKS = (1, 8, 64)
LIMITS = {"spider_8gb": 6.5, "spider_long": 140}
"""GiB that a configuration may take on a device; others are for 80 GB cards."""


def load(path: Path, *options: str) -> JobConfig:
    return load_config(["--job.config_file", str(path), "--job.dry_run", *options])


def units_of(config: JobConfig, ranks: int) -> tuple[list[Unit], int]:
    """The described units, and the model's parameters as its spec counts them."""
    with imagine_world(config.parallelism, ranks) as world:
        spec = config.model_spec
        context = PluginContext.from_config(config, world.mesh)
        model = apply_plugins(spec.build(config.model_config, device="meta"), spec, context)
        return describe_units(model, spec, context), spec.parameter_counts(model)["total"]


ESTIMATES: dict[str, int] = {}


@pytest.fixture
def estimated_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations do not depend on the ranks, and a step of a large model on the meta device takes seconds."""
    real, stem = dry_run.estimate_activations, request.node.callspec.params["path"].stem

    def remembered(*args: Any, **kwargs: Any) -> int:
        if stem not in ESTIMATES:
            ESTIMATES[stem] = real(*args, **kwargs)
        return ESTIMATES[stem]

    monkeypatch.setattr(dry_run, "estimate_activations", remembered)


@pytest.mark.usefixtures("estimated_once")
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations(path: Path, ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    config = load(path)
    with caplog.at_level(logging.INFO, logger="spider_titan"), imagine_world(config.parallelism, ranks) as world:
        dry_run.run(config, world)
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert f"on {ranks} imagined rank" in text
    assert "all-gathers" in text
    on_device = float(re.search(r"at most ([\d.]+) GiB on its device", text)[1])  # type: ignore[index]
    # What a driver and kernels take for themselves does not fit into the rest of the memory.
    assert on_device <= LIMITS.get(path.stem, 72), "such a card is too small"
    assert caplog.records[-1].getMessage() == "dry run done: nothing was trained or written"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_units_hold_every_parameter_once_and_shards_divide_them(path: Path) -> None:
    config = load(path)
    for ranks in RANKS:
        units, total = units_of(config, ranks)
        assert sum(unit.parameters for unit in units) == total
        local = sum(unit.local_parameters for unit in units)
        assert total / ranks <= local <= total / ranks * 1.05 + 1000 * ranks
        if ranks == 1:
            assert local == total


def test_memory_of_a_rank_by_hand() -> None:
    units = [Unit("a", 800, 200, 1600, True), Unit("b", 400, 100, 800, True), Unit("", 80, 20, 160, False)]
    with imagine_world(ParallelismConfig(), 4) as world:
        memory = describe_memory(units, world, 5000, 320 * 8, offloads=False)
    assert memory.state == 320 * 16
    assert memory.gathered == 1600 + 800 + 160
    assert memory.reduced == 4 * (800 + 200)
    assert memory.on_device == 320 * 16 + 2560 + 4000 + 5000
    alone = [Unit("a", 800, 800, 1600, True)]
    with imagine_world(ParallelismConfig(), 1) as world:
        memory = describe_memory(alone, world, 5000, 800 * 8, offloads=True)
    assert memory.reduced == 3 * 4 * 800
    assert memory.on_device == 1600 + 9600 + 5000


def test_the_baseline_costs_what_spider_costs() -> None:
    costs = []
    for stem in ("spider_10b", "byte_transformer_10b"):
        config = load(next(path for path in CONFIGS if path.stem == stem))
        costs.append(config.model_spec.flops_per_byte(config.model_config, config.training.seq_len))
    # Half a layer more or less is as near as whole layers come.
    assert costs[1] == pytest.approx(costs[0], rel=0.5 / 12)


def test_bf16_gathers_half_but_for_the_fp32_unit(tmp_path: Path) -> None:
    path = CONFIGS[[config.stem for config in CONFIGS].index("debug")]
    fp32, _ = units_of(load(path), 8)
    bf16, _ = units_of(load(path, "--precision.mode", "bf16"), 8)
    for full, half in zip(fp32, bf16, strict=True):
        factor = 1 if full.fqn == "boundary_predictor" else 2
        assert full.gathered_bytes == full.parameters * 4 == half.gathered_bytes * factor


def test_collectives_of_a_grid() -> None:
    units = [Unit("a", 8, 2, 32, True), Unit("b", 8, 2, 32, False)]
    parallelism = ParallelismConfig(data_parallel_replicate_degree=2)
    with imagine_world(parallelism, 8) as world:
        assert isinstance(world.mesh, DeviceMesh)
        assert vars(count_collectives(units, world, 3)) == {
            "all_gathers": 9,
            "reduce_scatters": 6,
            "gradient_all_reduces": 6,
            "scalar_all_reduces": 3,
        }
    with imagine_world(ParallelismConfig(), 1) as world:
        assert set(vars(count_collectives(units, world, 3)).values()) == {0}


@pytest.mark.parametrize(("replicate", "shard", "ranks"), [(2, -1, 3), (2, 2, 8), (1, 4, 2)])
def test_degrees_that_do_not_fit_are_refused(replicate: int, shard: int, ranks: int) -> None:
    config = ParallelismConfig(replicate, shard)
    with pytest.raises(ValueError, match=r"parallelism\.data_parallel_replicate_degree .* is not the number of ranks"):
        imagine_world(config, ranks)


def test_stacks_are_sharded_on_the_first_dim_that_divides() -> None:
    import torch

    def dim(shape: tuple[int, ...], shards: int) -> int | None:
        placement = placement_rule(shards)(torch.nn.Parameter(torch.empty(shape, device="meta")))
        return None if placement is None else placement.dim

    assert dim((8, 128, 16), 4) == 0
    assert dim((8, 128, 16), 16) == 1
    assert dim((8, 15, 48), 16) == 2
    assert dim((8, 128, 16), 3) is None
    assert dim((7, 12), 3) is None
    assert gathered_itemsize(torch.empty(1), 2) == 2


def test_dry_run_is_of_the_command_line_alone(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[job]\ndry_run = true\n")
    with pytest.raises(ValueError, match=r"run\.toml: job\.dry_run belongs on the command line"):
        load_config(["--job.config_file", str(file)])
