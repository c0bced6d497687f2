"""Steps whose loss or gradient is not finite: skipped by all ranks together, counted, and the end of a run if many."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor

from spider_titan import train
from spider_titan.checkpoint import tensors
from spider_titan.checkpoint.training import Progress
from spider_titan.config import load_config, to_toml
from spider_titan.console import setup_console
from spider_titan.distributed import CommConfig, ParallelismConfig, World, join_world
from spider_titan.trainer import Trainer
from spider_titan.watch import NonFiniteError, StepWatch

from .faults import poison
from .ranks import full, spawn, spider_toml

RUN = """
[training]
steps = 7
seq_len = 64
local_batch_size = 1
global_batch_size = 4
max_skipped_steps = 3
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 2
[validation]
enable = false
[metrics]
log_freq = 1
enable_tensorboard = false
[data.sources.english]
part = "english"
[[data.phases]]
until = 0.6
weights = { english = 1.0 }
boundary = "fixed"
[[data.phases]]
until = 1.0
weights = { english = 1.0 }
"""
ONE_PHASE = RUN.partition("[[data.phases]]")[0]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world(ParallelismConfig(), CommConfig()) as world:
        yield world


def make_trainer(world: World, folder: Path, *options: str, run: str = RUN) -> Trainer:
    file = folder / f"run{world.rank}.toml"
    file.write_text(f"{spider_toml()}router_bias_rate = 0.01\n{run}")
    config = load_config(["--job.config_file", str(file), "--job.dump_folder", str(folder / "run"), *options])
    return Trainer(config, to_toml(config), world)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    named = {**tensors.model_tensors(trainer.model), **trainer.optimizer.state_tensors()}
    return {name: full(value).detach().clone() for name, value in named.items()}


def step_by_step(trainer: Trainer) -> list[dict[str, Tensor]]:
    """Trains; returns the state before the first step and after each."""
    states, real = [state_of(trainer)], trainer._count

    def count(*args: Any) -> None:
        real(*args)
        states.append(state_of(trainer))

    trainer._count = count  # type: ignore[method-assign]
    trainer.train()
    return states


def same(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    """Optimizer state that is new must be zero, as it is before a first update."""
    return all(torch.equal(before.get(name, torch.zeros_like(value)), value) for name, value in after.items())


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_one_rank(world: World, tmp_path: Path, kind: str, implementation: str) -> None:
    trainer = make_trainer(world, tmp_path, "--optimizer.implementation", implementation)
    poison(trainer, {2, 4, 5}, kind)
    states = step_by_step(trainer)
    skipped = [step for step in range(7) if same(states[step], states[step + 1])]
    assert skipped == [2, 4, 5]
    assert [line["skipped_steps"] for line in logged(tmp_path)] == [0, 0, 1, 1, 2, 3, 3]
    assert all(value.isfinite().all() for value in states[-1].values())
    assert (trainer.progress.step, trainer.progress.skipped_in_row) == (7, 0)


def test_the_count_outlives_the_process(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("spider_titan"), "propagate", True)
    save = ("--checkpoint.enable", "--checkpoint.interval", "4")
    first = make_trainer(world, tmp_path, *save, "--training.steps", "4")
    poison(first, {2, 3})
    first.train()
    kept = state_of(first)
    second = make_trainer(world, tmp_path, *save)
    assert (second.progress.skipped_steps, second.progress.skipped_in_row) == (2, 2)
    assert second.monitor._state == first.monitor._state and len(second.monitor._state["losses"]) == 2
    poison(second, {4}, "gradient")
    with pytest.raises(NonFiniteError, match=r"step 5: .*grad_norm.* 3 steps in a row"):
        second.train()
    second.run_directory.close()
    assert "step 3 is skipped on all ranks: the loss is not finite on 1 of 1 ranks" in caplog.text
    third = make_trainer(world, tmp_path, *save)
    assert third.progress.step == 4
    assert same(state_of(third), kept)
    third.train()
    assert [line["skipped_steps"] for line in logged(tmp_path)] == [0, 0, 1, 2, 2, 2, 2]


def test_a_device_that_lags_is_not_waited_for(world: World) -> None:
    watch, progress = StepWatch(world, lag=2), Progress(num_rows=1, interleave={})
    for step in range(4):
        norms = {"grad_norm": torch.tensor(1.0), "grad_norm/a": torch.tensor(torch.nan if step == 1 else 1.0)}
        sums, skip = watch.add_up(step, torch.tensor(2.0), {"x": torch.tensor([1.0, 2.0])}, norms)
        assert sums["x"].tolist() == [1.0, 2.0] and sums.keys() == {"x"}
        assert skip == (step == 1)
        reports = watch.review(progress, 10, wait=False)
        assert [report.step for report in reports] == ([step - 2] if step >= 2 else [])
    assert progress.skipped_steps == 1
    last = watch.review(progress, 10, wait=True)
    assert [(report.step, report.loss, report.bad_norms) for report in last] == [(2, 2.0, ()), (3, 2.0, ())]


def two_ranks(rank: int, folder: str) -> None:
    with join_world(ParallelismConfig(), CommConfig(init_timeout_seconds=60)) as world:
        setup_console(rank=rank)
        bounds = (
            *("--monitor.expert_window", "2"),
            *("--monitor.max_boundary_rate", "0.2", "--monitor.max_boundary_dropped", "1.0"),
        )
        trainer = make_trainer(world, Path(folder), *bounds)
        poison(trainer, {1, 3}, "loss" if rank else "gradient", rank=1)
        poison(trainer, {4}, "gradient", rank=0)
        trainer.model.core.routers()[1].balance_bias[2] = -100.0
        states = step_by_step(trainer)
        assert [step for step in range(7) if same(states[step], states[step + 1])] == [1, 3, 4]
        assert all(value.isfinite().all() for value in states[-1].values())
        assert trainer.progress.skipped_steps == 3
    end_of_a_run(rank, Path(folder))


def end_of_a_run(rank: int, folder: Path) -> None:
    """The command's exit status after too many steps in a row, though only rank 1 had a bad loss."""

    class Poisoned(Trainer):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            poison(self, range(2, 100), rank=1)

    train.Trainer = Poisoned  # type: ignore[misc]
    options = ("--job.dump_folder", str(folder / "ended"), "--checkpoint.enable", "--checkpoint.interval", "3")
    assert train.main(["--job.config_file", str(folder / f"run{rank}.toml"), *options]) == 1


def have_boundaries(model: nn.Module) -> None:
    """At about half of the bytes."""
    predictor = model.boundary_predictor
    predictor.bias.copy_(-full(predictor.output.bias)[0])


def drift(model: nn.Module) -> None:
    have_boundaries(model)
    overwrite(model.core.adapter.up_proj.weight, lambda weight: weight.fill_(1.0))
    overwrite(model.core.adapter.scale.weight, lambda scale: scale[-1].fill_(1000.0))


def collapse(model: nn.Module) -> None:
    have_boundaries(model)
    # All positions look alike to the router, and it likes the second expert.
    overwrite(model.core.loop_embedding.weight, lambda embedding: embedding.fill_(1000.0))
    overwrite(model.core.layers[0].moe.router.weight, lambda weight: weight[1].fill_(10.0))


def no_boundary(model: nn.Module) -> None:
    model.boundary_predictor.bias.fill_(-100.0)


def a_boundary_a_byte(model: nn.Module) -> None:
    model.boundary_predictor.bias.fill_(100.0)


FAULTS = {
    drift: ["drift"],
    # The layer that has collapsed to one expert starves others.
    collapse: ["collapse", "dead experts"],
    no_boundary: ["boundary rate"],
    a_boundary_a_byte: ["boundary rate", "dropped boundaries"],
}


def overwrite(parameter: Any, change: Callable[[Tensor], object]) -> None:
    """Changes a sharded parameter by what ``change`` does to the whole."""
    whole = parameter.full_tensor()
    change(whole)
    parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))


def faulty(rank: int, folder: str) -> None:
    with join_world(ParallelismConfig(), CommConfig(init_timeout_seconds=60)) as world:
        setup_console(rank=rank)
        for fault in FAULTS:
            options = ("--job.dump_folder", str(Path(folder) / fault.__name__), "--training.steps", "1")
            # Segments are few where nothing but an end of a document closes one.
            bounds = () if fault is no_boundary else ("--monitor.expert_window", "1")
            if fault is not a_boundary_a_byte:
                bounds += ("--monitor.max_boundary_rate", "0.6", "--monitor.max_boundary_dropped", "1.0")
            trainer = make_trainer(world, Path(folder), *options, *bounds, run=ONE_PHASE)
            with torch.no_grad():
                fault(trainer.model)
            said: list[str] = []
            trainer.monitor._warn = said.append
            trainer.train()
            torch.save(said, Path(folder) / f"{fault.__name__}.{rank}.pt")


def test_faults_are_named_on_two_ranks(tmp_path: Path) -> None:
    spawn(2, faulty, str(tmp_path))
    for fault, kinds in FAULTS.items():
        first, second = (torch.load(tmp_path / f"{fault.__name__}.{rank}.pt") for rank in range(2))
        assert first == second
        assert [line.split(": ")[:3] for line in first] == [["monitor", "step 1", kind] for kind in kinds]


def test_two_ranks_skip_what_one_cannot_use(tmp_path: Path) -> None:
    spawn(2, two_ranks, str(tmp_path))
    assert [line["skipped_steps"] for line in logged(tmp_path)] == [0, 1, 1, 2, 3, 3, 3]
    ended = (tmp_path / "ended" / "logs" / "train.log").read_text().splitlines()
    assert "step 5: the loss is not finite on 1 of 2 ranks, and so for 3 steps in a row" in ended[-1]
    assert [file.name for file in (tmp_path / "ended" / "checkpoint").glob("step-*")] == ["step-3"]
    lines = (tmp_path / "run" / "logs" / "train.log").read_text().splitlines()
    warnings = [line.split("WARNING  ")[1].split(": ")[:3] for line in lines if "WARNING" in line]
    assert [kind for what, *rest in warnings if what == "monitor" for kind in rest[1:]] == [
        "boundary rate",
        "dead experts",
    ]
    assert [what for what, *_ in warnings if what != "monitor"] == [
        f"step {step} is skipped on all ranks" for step in (2, 4, 5)
    ]


def test_monitoring_changes_no_weight(world: World, tmp_path: Path) -> None:
    """With samples at every step and all warnings, against none."""
    states = []
    for name, options in (
        ("off", ("--monitor.no-enable", "--monitor.sample_freq", "0", "--metrics.log_freq", "5")),
        ("on", ("--monitor.sample_freq", "1", "--monitor.drift_ratio", "1.001", "--metrics.enable_tensorboard")),
    ):
        (tmp_path / name).mkdir()
        trainer = make_trainer(world, tmp_path / name, *options)
        trainer.train()
        states.append(state_of(trainer))
    assert states[0].keys() == states[1].keys() and same(*states)
    events = EventAccumulator(str(tmp_path / "on" / "run" / "tb"), {"images": 0, "tensors": 0}).Reload()
    assert [event.step for event in events.Images("samples/expert_load")] == list(range(1, 8))
    texts = events.Tensors("samples/segments/text_summary")
    assert [event.step for event in texts] == list(range(1, 8))
    shown = texts[0].tensor_proto.string_val[0].decode()
    assert shown.startswith("    ") and shown.count("|") > 5
