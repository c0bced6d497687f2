"""Dry runs of all shipped configurations, at sizes that no machine here has."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from torch.distributed.device_mesh import DeviceMesh

from spider_titan import dry_run
from spider_titan.config import JobConfig, load_config
from spider_titan.distributed import ParallelismConfig, imagine_world
from spider_titan.dry_run import Unit, count_collectives, describe_units, gathered_itemsize
from spider_titan.plugins import PluginContext, apply_plugins
from spider_titan.plugins.fsdp import placement_rule

CONFIGS = sorted((Path(__file__).parents[2] / "train_configs").glob("*.toml"))
RANKS = (1, 8, 64)


def load(path: Path, *options: str) -> JobConfig:
    return load_config(["--job.config_file", str(path), "--job.dry_run", *options])


def units_of(config: JobConfig, ranks: int) -> tuple[list[Unit], int]:
    """The described units, and the model's parameters as its spec counts them."""
    with imagine_world(config.parallelism, ranks) as world:
        spec = config.model_spec
        context = PluginContext.from_config(config, world.mesh)
        model = apply_plugins(spec.build(config.model_config, device="meta"), spec, context)
        return describe_units(model, spec, context), spec.parameter_counts(model)["total"]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations(path: Path, ranks: int, caplog: pytest.LogCaptureFixture) -> None:
    config = load(path)
    with caplog.at_level(logging.INFO, logger="spider_titan"), imagine_world(config.parallelism, ranks) as world:
        dry_run.run(config, world)
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert f"on {ranks} imagined rank" in text
    assert "all-gathers" in text
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
