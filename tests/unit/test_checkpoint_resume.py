"""A run that is stopped and goes on, against one that is not; in one process, through the trainer."""

from __future__ import annotations

import json
import logging
import os
import pickle
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from spider_titan import plugins
from spider_titan.checkpoint import folders, tensors
from spider_titan.config import load_config, to_toml
from spider_titan.distributed import CommConfig, ParallelismConfig, World, join_world
from spider_titan.interrupt import Stopped, StopRequest
from spider_titan.run_directory import DiskError
from spider_titan.trainer import Trainer

from .reference.tiny import SPIDER_TOML

RUN = f"""{SPIDER_TOML}router_bias_rate = 0.01
[training]
steps = 12
seq_len = 64
local_batch_size = 2
global_batch_size = 4
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 6
[validation]
freq = 4
bytes = 500
[metrics]
log_freq = 1
[checkpoint]
enable = true
interval = 5
[data.sources.english]
part = "english"
[data.sources.code]
part = "code"
[[data.phases]]
until = 0.5
weights = {{ english = 1.0 }}
boundary = "fixed"
[[data.phases]]
until = 1.0
weights = {{ english = 0.6, code = 0.4 }}
"""
TIMES = {"bytes_per_second", "eta_seconds", "loader_wait"}


class CrashError(Exception):
    """Stands for the end of the process."""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world(ParallelismConfig(), CommConfig()) as world:
        yield world


@pytest.fixture(scope="module")
def unbroken(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that is never stopped."""
    folder = tmp_path_factory.mktemp("unbroken")
    leg(world, folder)
    return folder


def make_trainer(world: World, folder: Path, *options: str, stop: StopRequest | None = None, run: str = RUN) -> Trainer:
    file = folder / "run.toml"
    file.write_text(run)
    config = load_config(["--job.config_file", str(file), "--job.dump_folder", str(folder / "run"), *options])
    return Trainer(config, to_toml(config), world, stop)


def leg(world: World, folder: Path, *options: str, crash_at: int | None = None, **arguments: Any) -> Trainer:
    """Trains to the end, or until a step is computed but not yet counted."""
    trainer = make_trainer(world, folder, *options, **arguments)
    real = trainer._forward_backward

    def crashing(step: int, *rest: Any) -> Any:
        if step == crash_at:
            raise CrashError
        return real(step, *rest)

    trainer._forward_backward = crashing  # type: ignore[method-assign]
    try:
        trainer.train()
    except CrashError:
        abandon(trainer)
    return trainer


def abandon(trainer: Trainer) -> None:
    """What the end of a process does."""
    assert trainer.run_directory is not None
    trainer.run_directory.close()


def logged(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]


def checkpoints(folder: Path) -> Path:
    return folder / "run" / "checkpoint"


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    named = {**tensors.model_tensors(trainer.model)}
    named |= {tensors.OPTIMIZER + name: value for name, value in trainer.optimizer.state_tensors().items()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone() for name, value in named.items()
    }


@pytest.mark.parametrize(
    ("mode", "workers"), [("disabled", 0), pytest.param("disabled", 2, marks=pytest.mark.slow), ("async", 0)]
)
def test_two_crashes_change_no_number(world: World, unbroken: Path, tmp_path: Path, workers: int, mode: str) -> None:
    options = ("--data.num_workers", str(workers), "--checkpoint.async_mode", mode)
    # Within warm-up, with the predictor frozen; then within the second phase, after it has begun to move.
    leg(world, tmp_path, *options, crash_at=5).checkpoints.close()
    leg(world, tmp_path, *options, crash_at=9).checkpoints.close()
    last = leg(world, tmp_path, *options)
    assert logged(tmp_path) == logged(unbroken)
    assert [line["step"] for line in logged(tmp_path) if "loss" in line] == list(range(1, 13))
    assert last.progress.step == 12


SAMPLED = ("--model.sample_loops", "poisson", "--model.num_loops", "3", "--model.backprop_loops", "2")


@pytest.mark.parametrize("options", [("--precision.mode", "bf16"), SAMPLED], ids=["bf16", "sampled loops"])
def test_other_settings_go_on_to_the_bit(world: World, tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    leg(world, tmp_path / "a", *options)
    leg(world, tmp_path / "b", *options, crash_at=7)
    leg(world, tmp_path / "b", *options)
    assert logged(tmp_path / "a") == logged(tmp_path / "b")


def test_every_tensor_on_disk_is_the_live_one(world: World, tmp_path: Path) -> None:
    trainer = leg(world, tmp_path, "--training.steps", "20")
    live = state_of(trainer)
    folder = folders.step_folder(checkpoints(tmp_path), 20)
    stored = tensors.read_metadata(folder)
    assert stored.keys() == live.keys()
    read = {name: torch.full_like(value, 77) for name, value in live.items()}
    tensors.load(folder, read)
    for name, value in live.items():
        assert read[name].dtype == value.dtype == stored[name].properties.dtype, name
        assert torch.equal(read[name], value), name
    assert {name.rpartition(".")[2] for name in live if name.startswith("optimizer.")} >= {"exp_avg", "exp_avg_sq"}
    assert any("balance_bias" in name for name in live)


def test_frozen_groups_have_no_state_before_and_after_a_resume(world: World, tmp_path: Path) -> None:
    first = make_trainer(world, tmp_path)
    before = state_of(first)
    abandon(first)
    shutil.rmtree(tmp_path / "run")
    leg(world, tmp_path, crash_at=5)
    trainer = make_trainer(world, tmp_path)
    assert trainer.progress.step == 5
    after = state_of(trainer)
    predictor = [
        name for name in after if name.startswith("model.boundary_predictor.") and name.split(".")[2] != "bias"
    ]
    assert not any(name.startswith("optimizer.boundary_predictor.") for name in after)
    parameters = [name for name in predictor if "rate_average" not in name]
    assert parameters
    assert all(torch.equal(after[name], before[name]) for name in parameters)
    assert not torch.equal(after["model.lm_head.weight"], before["model.lm_head.weight"])
    abandon(trainer)


def test_a_finished_run_can_be_extended(world: World, unbroken: Path, tmp_path: Path) -> None:
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    leg(world, tmp_path)
    assert logged(tmp_path) == logged(unbroken)
    trainer = leg(world, tmp_path, "--training.steps", "15")
    assert trainer.progress.step == 15
    assert [line["step"] for line in logged(tmp_path) if "loss" in line] == list(range(1, 16))
    kept = folders.read_kept(checkpoints(tmp_path))
    assert kept["final"] == {"step": 15}


def test_best_and_latest_are_kept(world: World, unbroken: Path) -> None:
    root = checkpoints(unbroken)
    validations = {line["step"]: line["validation_bpb"] for line in logged(unbroken) if "validation_bpb" in line}
    best = min(validations, key=lambda step: validations[step])
    kept = folders.read_kept(root)
    assert kept == {"best": {"step": best, "value": validations[best]}, "final": {"step": 12}}
    assert folders.steps_in(root) == sorted({12, 10, best}, reverse=True)
    assert all(path.name.startswith(("step-", "kept")) for path in root.iterdir())


def test_damaged_ones_are_passed_over_by_name(
    world: World, unbroken: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    root = checkpoints(tmp_path)
    os.truncate(root / "step-12" / "__0_0.distcp", 100)
    (root / "step-999").mkdir()
    (root / "readme.txt").write_text("mine")
    with caplog.at_level(logging.WARNING, logger="spider_titan"):
        trainer = make_trainer(world, tmp_path)
    assert trainer.progress.step == 10
    messages = [record.getMessage() for record in caplog.records]
    assert any("passed over" in message and "step-999: complete.json is missing" in message for message in messages)
    assert any("step-12: __0_0.distcp has 100 bytes instead of" in message for message in messages)
    trainer.train()
    assert logged(tmp_path) == logged(unbroken)
    assert (root / "readme.txt").exists()


def test_all_damaged_is_an_error_not_a_fresh_start(world: World, unbroken: Path, tmp_path: Path) -> None:
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    for step in folders.steps_in(checkpoints(tmp_path)):
        (folders.step_folder(checkpoints(tmp_path), step) / "complete.json").unlink()
    with pytest.raises(ValueError, match=r"no checkpoint in .* is complete: \d passed over"):
        make_trainer(world, tmp_path)


def test_a_step_can_be_asked_for(world: World, unbroken: Path, tmp_path: Path) -> None:
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    (tmp_path / "other").mkdir()
    shutil.copytree(unbroken, tmp_path / "other", dirs_exist_ok=True)
    with pytest.raises(ValueError, match=r"checkpoint\.load_step = 7: .* has step-12, step-10"):
        make_trainer(world, tmp_path / "other", "--checkpoint.load_step", "7")
    trainer = leg(world, tmp_path, "--checkpoint.load_step", "10")
    assert trainer.progress.step == 12
    assert logged(tmp_path) == logged(unbroken)
    assert (checkpoints(tmp_path) / "superseded-step-12").is_dir()


def test_another_model_is_refused_with_the_differences(world: World, unbroken: Path, tmp_path: Path) -> None:
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    run = RUN.replace("num_experts = 4", "num_experts = 6").replace("num_coda_layers = 1", "num_coda_layers = 2")
    with pytest.raises(ValueError, match="of another model") as caught:
        make_trainer(world, tmp_path, run=run)
    message = str(caught.value)
    assert "model.coda.1" in message
    assert "is not in it" in message
    assert "and" in message.splitlines()[-2]


def predictor_of(trainer: Trainer) -> dict[str, Tensor]:
    """Whole weights of the groups that start after the warm-up."""
    named = tensors.model_tensors(trainer.model)
    groups = [group for group in trainer.optimizer.groups if group.starts_after_warmup]
    return {name: named[tensors.MODEL + name].full_tensor().clone() for group in groups for name in group.parameters}


def test_the_predictor_waits_for_the_end_of_the_warm_up_and_then_moves_slowly(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped within the warm-up of 6 steps and after it: no bit changes, then a tenth of the learning rate."""
    weights: dict[int, dict[str, Tensor]] = {}
    real = Trainer._count

    def count(trainer: Trainer, *args: Any) -> None:
        real(trainer, *args)
        weights[trainer.progress.step] = predictor_of(trainer)

    monkeypatch.setattr(Trainer, "_count", count)
    slow = ("--model.boundary_lr_factor", "0.1", "--optimizer.weight_decay", "0")
    (tmp_path / "fresh").mkdir()
    fresh = make_trainer(world, tmp_path / "fresh", *slow)
    initial = predictor_of(fresh)
    abandon(fresh)
    for crash_at in (5, 9, None):
        last = leg(world, tmp_path, *slow, crash_at=crash_at)
    assert sorted(weights) == list(range(1, 13)) and len(initial) == 5
    for name, value in initial.items():
        assert all(torch.equal(weights[step][name], value) for step in range(1, 7)), name
        # The first update of AdamW is the learning rate, whatever the gradient; a later one is not much more.
        moves = [(weights[step + 1][name] - weights[step][name]).abs().max() for step in range(6, 12)]
        rates = [0.1 * last.optimizer.lr(step) for step in range(6, 12)]
        assert float(moves[0]) == pytest.approx(rates[0], rel=1e-3), name
        assert all(0 < move < 1.5 * rate for move, rate in zip(moves, rates, strict=True)), name


WIDE = RUN.replace("hidden_size = 32\n", "hidden_size = 256\n").replace(
    "\nintermediate_size = 32\n", "\nintermediate_size = 256\n"
)
"""Matrices whose averages are kept in 8 bits."""


def test_averages_in_8_bits_are_resumed_to_the_bit(world: World, tmp_path: Path) -> None:
    options = ("--optimizer.name", "adamw8bit", "--training.steps", "8", "--validation.no-enable")
    # Compiling the update takes longer than all else.
    with torch.compiler.set_stance("force_eager"):
        (tmp_path / "whole").mkdir()
        whole = leg(world, tmp_path / "whole", *options, run=WIDE)
        leg(world, tmp_path, *options, crash_at=6, run=WIDE)
        resumed = leg(world, tmp_path, *options, run=WIDE)
    state, expected = state_of(resumed), state_of(whole)
    assert any(name.endswith(".exp_avg_codes") and value.dtype == torch.uint8 for name, value in expected.items())
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert logged(tmp_path) == logged(tmp_path / "whole")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--training.global_batch_size", "8"),
            "was made with 4 rows a step, and this run has 8; set training.global_",
        ),
        (
            ("--data.sources.code.interleave", "2"),
            r"was made with data\.sources\.code\.interleave = 1, and this run has 2; set it",
        ),
        # As many shards as before.
        (
            ("--training.global_batch_size", "2", "--data.sources.english.interleave", "2"),
            "was made with 4 rows a step, and this run has 2; set",
        ),
    ],
)
def test_other_shards_are_refused(
    world: World, unbroken: Path, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    with pytest.raises(ValueError, match=message):
        make_trainer(world, tmp_path, *options)


def test_a_stop_is_saved_and_resumed(world: World, unbroken: Path, tmp_path: Path) -> None:
    class StopAfter(StopRequest):
        """A wish to stop at the n-th time it is asked."""

        asked, limit = 0, 0

        @property
        def reason(self) -> str:
            self.asked += 1
            return "enough" if self.asked > self.limit else ""

    for limit in (0, 3, 5, 1, 2, 6):
        stop = StopAfter()
        stop.limit = limit
        trainer = make_trainer(world, tmp_path, stop=stop)
        with pytest.raises(Stopped) as stopped:
            trainer.train()
        step = trainer.progress.step
        assert str(stopped.value) == f"enough; the state after step {step} is saved: the same command goes on"
        assert folders.steps_in(checkpoints(tmp_path))[0] == step
    leg(world, tmp_path)
    assert logged(tmp_path) == logged(unbroken)


def test_a_signal_ends_the_wait_for_data(world: World, unbroken: Path, tmp_path: Path) -> None:
    with StopRequest() as stop:
        trainer = make_trainer(world, tmp_path, stop=stop)
        real, waited_on = trainer.batches, []

        def waiting() -> Iterator[Any]:
            for number, batch in enumerate(real):
                if number == 9:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(60)
                    waited_on.append(number)
                yield batch

        trainer.batches = waiting()  # type: ignore[assignment]
        with pytest.raises(Stopped, match="received SIGTERM; the state after step 4 is saved"):
            trainer.train()
        assert waited_on == []
    leg(world, tmp_path)
    assert logged(tmp_path) == logged(unbroken)


def test_initial_weights_and_seed_checkpoints(world: World, unbroken: Path, tmp_path: Path) -> None:
    (tmp_path / "seed").mkdir()
    (tmp_path / "from").mkdir()
    seed = leg(world, tmp_path / "seed", "--checkpoint.create_seed_checkpoint")
    assert folders.steps_in(checkpoints(tmp_path / "seed")) == [0]
    assert seed.progress.step == 0
    assert leg(world, tmp_path / "seed").progress.step == 12
    assert logged(tmp_path / "seed") == logged(unbroken)
    path = folders.step_folder(checkpoints(unbroken), 12)
    trainer = make_trainer(world, tmp_path / "from", "--checkpoint.initial_load_path", str(path))
    assert trainer.progress.step == 0
    assert trainer.optimizer.state_tensors() == {}
    wanted = {name: torch.zeros_like(value) for name, value in state_of(trainer).items()}
    tensors.load(path, wanted)
    assert all(torch.equal(value, wanted[name]) for name, value in state_of(trainer).items())
    abandon(trainer)
    with pytest.raises(ValueError, match=r"checkpoint\.initial_load_path = .* is no complete checkpoint"):
        make_trainer(world, tmp_path / "from", "--checkpoint.initial_load_path", str(tmp_path))


def test_what_changes_after_an_async_save_is_not_written(world: World, tmp_path: Path) -> None:
    trainer = make_trainer(world, tmp_path, "--checkpoint.async_mode", "async")
    assert trainer.checkpoints is not None
    trainer.rate = type("Rate", (), {"paused": lambda self: torch.no_grad()})()  # type: ignore[assignment]
    saved = state_of(trainer)
    trainer._save()
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(1.0)
    trainer.checkpoints.close()
    read = {name: torch.zeros_like(value) for name, value in saved.items()}
    tensors.load(folders.step_folder(checkpoints(tmp_path), 0), read)
    assert all(torch.equal(read[name], value) for name, value in saved.items())
    abandon(trainer)


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_save_that_fails_ends_the_run_and_keeps_the_last(
    world: World, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    trainer = make_trainer(world, tmp_path, "--checkpoint.async_mode", mode)
    real = trainer._forward_backward

    def failing_later(step: int, *rest: Any) -> Any:
        if step == 6:
            trainer.checkpoints.wait()  # type: ignore[union-attr]
            monkeypatch.setattr(folders, "write_marker", fail)
        return real(step, *rest)

    trainer._forward_backward = failing_later  # type: ignore[method-assign]
    with pytest.raises(DiskError, match=r"cannot write the checkpoint .* of [\d,]+ bytes: No space left on device"):
        trainer.train()
    abandon(trainer)
    monkeypatch.undo()
    assert folders.steps_in(checkpoints(tmp_path)) == [5, 4]
    assert make_trainer(world, tmp_path).progress.step == 5


def test_an_index_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, ("touch " + str(tmp_path / "ran"),)

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(pickle.UnpicklingError, match=r"the index names \w+\.system"):
        tensors.read_metadata(tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_float8_shards_are_saved_as_plain_tensors(world: World, tmp_path: Path) -> None:
    options = ("--precision.mode", "fp8_dynamic", "--precision.fp8_recipe", "tensorwise", "--precision.emulate")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    leg(world, tmp_path / "a", *options, "--precision.fp8_all_gather")
    leg(world, tmp_path / "b", *options, "--precision.fp8_all_gather", crash_at=7)
    leg(world, tmp_path / "b", *options, "--precision.fp8_all_gather")
    assert logged(tmp_path / "a") == logged(tmp_path / "b")


def test_plugins_hear_of_loaded_weights(world: World, unbroken: Path, tmp_path: Path, monkeypatch: Any) -> None:
    shutil.copytree(unbroken, tmp_path, dirs_exist_ok=True)
    seen: list[Tensor] = []

    def record(model: Any, context: Any) -> None:
        seen.append(model.lm_head.weight.full_tensor().clone())

    monkeypatch.setattr(plugins, "after_step", record)
    trainer = make_trainer(world, tmp_path)
    assert torch.equal(seen[-1], trainer.model.lm_head.weight.full_tensor())
    abandon(trainer)


ENDING = RUN.replace('[[data.phases]]\nuntil = 0.5\nweights = { english = 1.0 }\nboundary = "fixed"\n', "").replace(
    "weights = { english = 0.6, code = 0.4 }", "weights = { mine = 1.0 }"
)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_end_of_data_ends_the_run_as_its_last_step_does(world: World, tmp_path: Path, workers: int) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"text {number} " * 30)
    source = f'[data.sources.mine]\nkind = "files"\npath = "{tmp_path}/texts/*.txt"\nrepeat = false\n'
    run = ENDING + source + "[data]\nheld_out_fraction = 0.2\n"
    options = ("--training.steps", "1000", "--checkpoint.keep_epoch_ends", "--data.num_workers", str(workers))
    trainer = leg(world, tmp_path, *options, run=run)
    last = trainer.progress.step
    assert 12 < last < 60
    assert logged(tmp_path)[-1]["step"] == last
    assert "validation_bpb" in logged(tmp_path)[-1]
    assert folders.read_kept(checkpoints(tmp_path))["final"] == {"step": last}
    before = logged(tmp_path)
    assert leg(world, tmp_path, *options, run=run).progress.step == last
    assert [line for line in logged(tmp_path) if "loss" in line] == [line for line in before if "loss" in line]
    # The same with epoch after epoch.
    (tmp_path / "run").rename(tmp_path / "once")
    leg(world, tmp_path, *options[2:], "--training.steps", "60", run=run.replace("repeat = false", ""))
    kept = folders.read_kept(checkpoints(tmp_path))
    assert last <= kept["epoch-1"]["step"] <= 60
    assert {entry["step"] for entry in kept.values()} <= set(folders.steps_in(checkpoints(tmp_path)))
