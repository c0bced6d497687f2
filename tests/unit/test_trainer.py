"""The trainer against plain code, against itself with other micro-batches, and with what must not change it."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.distributed.tensor import DTensor

from spider_titan import trainer as trainer_module
from spider_titan.config import load_config, to_toml
from spider_titan.distributed import CommConfig, ParallelismConfig, World, join_world
from spider_titan.metrics import RateMeter
from spider_titan.models.spider.loops import draw_loops
from spider_titan.optim import GroupedAdamW, LRSchedulerConfig, OptimizerConfig
from spider_titan.spec import Batch, LossTerms, StepContext, get_model_spec
from spider_titan.trainer import Trainer

from .reference.tiny import BYTE_TRANSFORMER_TOML, SPIDER_TOML

RUN = """
[training]
steps = 8
seq_len = 64
local_batch_size = 4
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 2
[validation]
freq = 4
bytes = 500
[metrics]
log_freq = 1
enable_tensorboard = false
[[data.phases]]
until = 0.5
weights = { english = 1.0 }
boundary = "fixed"
[[data.phases]]
until = 1.0
weights = { english = 1.0 }
"""


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world(ParallelismConfig(), CommConfig()) as world:
        yield world


def make_trainer(world: World, folder: Path, *options: str, model: str = SPIDER_TOML) -> Trainer:
    file = folder / "run.toml"
    file.write_text(model + RUN)
    config = load_config(["--job.config_file", str(file), "--job.dump_folder", str(folder / "run"), *options])
    return Trainer(config, to_toml(config), world)


def train(world: World, folder: Path, *options: str, model: str = SPIDER_TOML) -> tuple[list[dict], dict]:
    """Trains; returns the training lines of metrics.jsonl and the weights."""
    folder.mkdir(exist_ok=True)
    trainer = make_trainer(world, folder, *options, model=model)
    trainer.train()
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], full_state(trainer.model)


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def assert_same(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert state.keys() == other.keys()
    for name, value in state.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("model", [SPIDER_TOML, BYTE_TRANSFORMER_TOML], ids=["spider", "byte_transformer"])
def test_a_rank_alone_is_bit_equal_to_plain_code(world: World, tmp_path: Path, model: str) -> None:
    """fully_shard on a mesh of one against a plain loop over a plain module."""
    trainer = make_trainer(world, tmp_path, model=model)
    spec, total = trainer.spec, trainer.total_steps
    plain = spec.build(load_config(["--job.config_file", str(tmp_path / "run.toml")]).model_config, seed=0)
    assert_same(full_state(trainer.model), full_state(plain))

    batches: list[Batch] = []
    original = trainer.batches
    trainer.batches = iter(lambda: batches.append(next(original)) or batches[-1], None)
    trainer.train()

    optimizer = GroupedAdamW(
        spec.param_groups(plain),
        OptimizerConfig(lr=3e-3),
        LRSchedulerConfig(warmup_steps=2),
        total,
        sum_over_shards=lambda squares: squares,
    )
    for step, batch in enumerate(batches):
        phase = trainer.curriculum.at(step)
        context = StepContext(
            num_targets=batch.num_targets,
            boundary_mode="topk" if step < total // 2 else "threshold",
            boundary_phase="fixed" if step < total // 2 else "adaptive",
            max_boundary_rate=phase.boundary_capacity,
            frozen_groups=frozenset({"boundary_predictor"}) if step < 2 else frozenset(),
        )
        terms = spec.loss(plain, batch, context)
        terms.total.backward()
        optimizer.clip(1.0)
        optimizer.step(step)
        optimizer.zero_grad()
        spec.after_step(plain, terms.sums, context)
    assert len(batches) == total
    assert_same(full_state(trainer.model), full_state(plain))


def test_micro_batches_equal_one_batch(world: World, tmp_path: Path) -> None:
    whole, weights = train(world, tmp_path / "whole")
    cut, cut_weights = train(
        world, tmp_path / "cut", "--training.local_batch_size", "1", "--training.global_batch_size", "4"
    )
    for one, other in zip(whole, cut, strict=True):
        for name in ("loss", "lm_loss", "bpb", "boundary_loss", "router_aux_loss"):
            assert (one.get(name) is None) == (other.get(name) is None)
            if one.get(name) is not None:
                assert other[name] == pytest.approx(one[name], rel=2e-5), (one["step"], name)
        assert one["bytes_seen"] == other["bytes_seen"] == one["step"] * 4 * 64
    for name, value in weights.items():
        torch.testing.assert_close(cut_weights[name], value, rtol=1e-3, atol=2e-4, msg=name)


def test_same_seed_same_run_other_seed_other_run(world: World, tmp_path: Path) -> None:
    _, first = train(world, tmp_path / "a")
    _, second = train(world, tmp_path / "b", "--training.deterministic")
    torch.use_deterministic_algorithms(False)
    _, third = train(world, tmp_path / "c", "--training.seed", "1")
    assert_same(first, second)
    assert not torch.equal(first["lm_head.weight"], third["lm_head.weight"])


def test_validation_does_not_touch_training(world: World, tmp_path: Path) -> None:
    _, with_validation = train(world, tmp_path / "a")
    _, without = train(world, tmp_path / "b", "--validation.no-enable")
    assert_same(with_validation, without)


def test_bf16_keeps_fp32_where_it_must(world: World, tmp_path: Path) -> None:
    trainer = make_trainer(world, tmp_path, "--precision.mode", "bf16")
    seen: dict[str, set[torch.dtype]] = {}

    def record(name: str) -> Callable[[nn.Module, tuple, Any], None]:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            tensors = output if isinstance(output, tuple) else (output,)
            seen.setdefault(name, set()).update(x.dtype for x in tensors if isinstance(x, torch.Tensor))

        return hook

    modules = dict(trainer.model.named_modules())
    for name in ("prelude.0", "boundary_predictor", "boundary_predictor.hidden", "core.layers.0.moe.router", "lm_head"):
        modules[name].register_forward_hook(record(name))
    rotary_dtypes = set()
    modules["prelude.0.attention"].register_forward_pre_hook(
        lambda module, args: rotary_dtypes.update(table.dtype for table in args[1])
    )
    trainer.train()
    assert seen["prelude.0"] == seen["lm_head"] == {torch.bfloat16}
    assert seen["boundary_predictor"] == seen["boundary_predictor.hidden"] == rotary_dtypes == {torch.float32}
    assert torch.bfloat16 not in seen["core.layers.0.moe.router"]
    assert {value.dtype for value in full_state(trainer.model).values()} == {torch.float32, torch.int64}


def test_bf16_trains_like_fp32(world: World, tmp_path: Path) -> None:
    fp32, _ = train(world, tmp_path / "fp32")
    bf16, _ = train(world, tmp_path / "bf16", "--precision.mode", "bf16")
    for one, other in zip(fp32, bf16, strict=True):
        assert other["lm_loss"] == pytest.approx(one["lm_loss"], rel=2e-2)
    assert bf16[0]["lm_loss"] != fp32[0]["lm_loss"]


def test_the_predictor_is_frozen_through_warmup(world: World, tmp_path: Path) -> None:
    initial = full_state(get_model_spec("spider").build(make_config(tmp_path), seed=0))
    _, frozen = train(world, tmp_path / "a", "--lr_scheduler.warmup_steps", "8")
    _, free = train(world, tmp_path / "b", "--lr_scheduler.warmup_steps", "7")
    name = "boundary_predictor.hidden.weight"
    assert torch.equal(frozen[name], initial[name])
    assert not torch.equal(free[name], initial[name])
    assert frozen["boundary_predictor.bias"] != 0.0, "the bias follows the rate during warm-up too"


def make_config(folder: Path) -> Any:
    file = folder / "run.toml"
    file.write_text(SPIDER_TOML + RUN)
    return load_config(["--job.config_file", str(file)]).model_config


def test_loss_falls_and_lines_are_complete(world: World, tmp_path: Path) -> None:
    lines, _ = train(world, tmp_path / "a", "--training.steps", "60", "--metrics.log_freq", "5")
    assert [line["step"] for line in lines] == [1, *range(5, 61, 5)]
    assert lines[-1]["bpb"] < 0.75 * lines[0]["bpb"]
    required = {"step", "loss", "lm_loss", "bpb", "grad_norm", "lr", "bytes_seen", "bytes_per_second"}
    assert all(required | {"boundary_rate", "phase"} <= line.keys() for line in lines)
    assert lines[0]["phase"] == "1/2 fixed" and lines[-1]["phase"] == "2/2 adaptive"
    assert lines[0]["bytes_per_second"] is None and lines[-1]["bytes_per_second"] > 0
    assert lines[0]["lr"] == pytest.approx(1.5e-3) and lines[-1]["lr"] == pytest.approx(3e-4)


def test_validation_at_several_loops(world: World, tmp_path: Path) -> None:
    """Each number is what a model that is told so measures; training does not notice."""
    _, without = train(world, tmp_path / "a", "--validation.no_enable")
    options = ("--validation.num_loops", "1", "2", "5")
    _, state = train(world, tmp_path / "b", *options)
    assert_same(state, without)
    lines = [json.loads(line) for line in (tmp_path / "b" / "run" / "metrics.jsonl").read_text().splitlines()]
    last = next(line for line in reversed(lines) if "validation_bpb" in line)
    assert last["validation_bpb/T=2"] == last["validation_bpb"], "2 is the trained number"
    trainer = make_trainer(world, tmp_path / "b", *options)
    plain: Any = trainer.spec.build(trainer.model_config, seed=0)
    plain.load_state_dict(state)
    plain.eval()
    assert trainer.validator is not None
    capacity = trainer.curriculum.at(7).boundary_capacity
    for number in (1, 5):
        nats, count = 0.0, 0
        for batch in trainer.validator._batches["english"]:
            with torch.no_grad():
                logits = plain(batch.input_ids, max_boundary_rate=capacity, num_loops=number).logits
            picked = logits.log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
            nats -= float(picked[batch.targets < 256].sum())
            count += int((batch.targets < 256).sum())
        assert last[f"validation_bpb/T={number}"] == pytest.approx(nats / count / math.log(2), rel=1e-5)
    assert last["validation_bpb/T=1"] != last["validation_bpb/T=5"]


def test_validation_at_several_loops_needs_loops(world: World, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"validation\.num_loops = .2. is for models that loop, and 'byte_tr"):
        make_trainer(world, tmp_path, "--validation.num_loops", "2", model=BYTE_TRANSFORMER_TOML)


def test_every_step_runs_the_loops_drawn_for_it(world: World, tmp_path: Path) -> None:
    options = ("--model.sample_loops", "poisson", "--model.num_loops", "3", "--training.seed", "5")
    trainer = make_trainer(world, tmp_path, *options)
    counts: list[int] = []

    def count(module: Any, arguments: Any, output: Any) -> None:
        if module.training:
            counts.append(trainer.progress.step)

    layer: Any = trainer.model.get_submodule("core.layers.0")
    layer.register_forward_hook(count)
    trainer.train()
    drawn = [draw_loops(trainer.model_config, 5, step) for step in range(8)]
    assert [counts.count(step) for step in range(8)] == drawn
    assert len(set(drawn)) > 1


def test_every_parameter_group_has_a_line_at_the_start(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("spider_titan"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="spider_titan"):
        make_trainer(world, tmp_path, "--model.boundary_lr_factor", "0.1")
    lines = {line.split()[1]: " ".join(line.split()) for line in caplog.messages if line.startswith("group: ")}
    shapes: dict[str, list[int]] = {}
    for name, parameter in get_model_spec("spider").build(make_config(tmp_path), device="meta").named_parameters():
        if name.startswith("boundary_predictor."):
            group = "boundary_predictor" if parameter.ndim > 1 else "boundary_predictor_no_decay"
        elif name.endswith(("W_gate", "W_transform")):
            group = "expert_cores"
        else:
            group = "engram_tables" if "embed" in name and name.startswith("engram") else "backbone"
        shapes.setdefault(group, []).append(parameter.numel())
    for name in ("backbone", "backbone_no_decay"):
        assert (" no decay" in lines[name]) is (name == "backbone_no_decay")
    endings = {
        "engram_tables": "lr x5 no decay rows move when hit",
        "boundary_predictor": "lr x0.1 decays starts after warm-up",
        "boundary_predictor_no_decay": "lr x0.1 no decay starts after warm-up",
        "expert_cores": "lr x1 decays own clip 0.5",
    }
    for name, ending in endings.items():
        sizes = shapes[name]
        assert lines[name] == f"group: {name} {len(sizes)} tensors {sum(sizes):,} parameters {ending}"
    backbone = [lines[name].split() for name in ("backbone", "backbone_no_decay")]
    assert sum(int(words[2]) for words in backbone) == len(shapes["backbone"])
    assert sum(int(words[4].replace(",", "")) for words in backbone) == sum(shapes["backbone"])
    assert lines.keys() == {*endings, "backbone", "backbone_no_decay"}


@pytest.mark.parametrize("log_freq", [1, 3])
def test_mfu_is_flops_over_the_seconds_at_the_peak(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_freq: int
) -> None:
    """Steps of 2 s, of drawn loops, and validations of many more, which do not count."""
    now = 0.0

    def pass_time(model: nn.Module, args: Any) -> None:
        nonlocal now
        now += 2.0 if model.training else 100.0

    monkeypatch.setattr(trainer_module, "RateMeter", partial(RateMeter, lambda: now))
    options = ("--model.sample_loops", "poisson", "--model.num_loops", "3", "--training.seed", "5")
    trainer = make_trainer(world, tmp_path, *options, "--metrics.log_freq", str(log_freq))
    trainer.model.register_forward_pre_hook(pass_time)
    config, num_bytes = trainer.model_config, 4 * 64
    flops = [trainer.spec.training_flops(config, 64, draw_loops(config, 5, step)) * num_bytes for step in range(8)]
    assert len(set(flops)) > 2
    trainer.peak_flops = max(flops[1:]) / 2.0
    trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line["mfu"] for line in lines if "loss" in line}
    assert logged.pop(1) is None, "the first step is never timed"
    begin = 1
    for step, mfu in logged.items():
        done = sum(flops[begin:step])
        assert mfu == pytest.approx(done / ((step - begin) * 2.0 * trainer.peak_flops)), step
        assert mfu <= 1.0 + 1e-9
        begin = step
    assert begin == 8 and (log_freq > 1 or max(logged.values()) == pytest.approx(1.0))


def test_tensorboard_has_every_step_once_after_a_crash(world: World, tmp_path: Path) -> None:
    saves = ("--checkpoint.enable", "--checkpoint.interval", "3")
    options = (*saves, "--metrics.enable_tensorboard", "--validation.no-enable")
    first = make_trainer(world, tmp_path, *options)
    real = first.spec.loss

    def fail(model: Any, batch: Batch, context: StepContext) -> LossTerms:
        if first.progress.step == 5:
            raise RuntimeError("crash")
        return real(model, batch, context)

    first.spec = dataclasses.replace(first.spec, loss=fail)
    with pytest.raises(RuntimeError, match="crash"):
        first.train()
    assert first.metrics is not None and first.metrics._tensorboard is not None and first.run_directory is not None
    first.metrics._tensorboard._writer.flush()
    assert logged_points(tmp_path) == [1, 2, 3, 4, 5], "steps 4 and 5 are to come again"
    first.run_directory.close()
    second = make_trainer(world, tmp_path, *options)
    assert second.progress.step == 3
    second.train()
    assert logged_points(tmp_path) == list(range(1, 9))


def logged_points(folder: Path) -> list[int]:
    """Steps of the loss's curve, over all event files of the run."""
    return [point.step for point in EventAccumulator(str(folder / "run" / "tb")).Reload().Scalars("loss/total")]


def test_a_spike_of_the_loss_is_warned_about(world: World, tmp_path: Path) -> None:
    trainer = make_trainer(world, tmp_path, "--training.steps", "24", "--metrics.log_freq", "100")
    real = trainer.spec.loss

    def spike(model: Any, batch: Batch, context: StepContext) -> LossTerms:
        terms = real(model, batch, context)
        return LossTerms(terms.total * (5.0 if trainer.progress.step == 21 else 1.0), terms.sums)

    trainer.spec = dataclasses.replace(trainer.spec, loss=spike)
    trainer.train()
    log = (tmp_path / "run" / "logs" / "train.log").read_text().splitlines()
    (line,) = [line for line in log if "loss spike" in line]
    assert "WARNING" in line and "monitor: step 22: loss spike: the loss is " in line
