"""Held-out bits a byte through the trainer: recomputed a source, always causal, and nothing of training moves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from spider_titan.config import load_config, to_toml
from spider_titan.distributed import CommConfig, ParallelismConfig, World, join_world
from spider_titan.trainer import Trainer
from spider_titan.vocabulary import PAD_ID

from .reference.tiny import SPIDER_TOML

RUN = """
[training]
steps = 4
seq_len = 64
local_batch_size = 2
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 0
[validation]
freq = 2
bytes = 700
[metrics]
log_freq = 1
enable_tensorboard = false
[data.sources.english]
part = "english"
[data.sources.code]
part = "code"
[[data.phases]]
until = 0.5
weights = { english = 1.0 }
boundary = "fixed"
selection = "topk"
max_boundary_rate = 0.31
[[data.phases]]
until = 1.0
weights = { english = 0.7, code = 0.3 }
max_boundary_rate = 0.5
"""
CAPACITIES = (0.31, 0.5)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world(ParallelismConfig(), CommConfig()) as world:
        yield world


@pytest.fixture
def trainer(world: World, tmp_path: Path) -> Trainer:
    file = tmp_path / "run.toml"
    file.write_text(SPIDER_TOML + RUN)
    config = load_config(["--job.config_file", str(file), "--job.dump_folder", str(tmp_path / "run")])
    return Trainer(config, to_toml(config), world)


def validations(trainer: Trainer) -> list[dict[str, Any]]:
    assert trainer.run_directory is not None
    lines = [json.loads(line) for line in trainer.run_directory.metrics_file.read_text().splitlines()]
    return [line for line in lines if "validation_bpb" in line]


def test_it_is_causal_whatever_the_phase_and_has_its_slots(trainer: Trainer) -> None:
    calls: list[tuple[int, bool, str, float]] = []

    def keep(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((trainer.progress.step, model.training, args[1], kwargs["max_boundary_rate"]))

    trainer.model.register_forward_pre_hook(keep, with_kwargs=True)
    trainer.train()
    trained = {call for call in calls if call[1]}
    assert trained == {
        *((step, True, "topk", CAPACITIES[0]) for step in (0, 1)),
        *((step, True, "threshold", CAPACITIES[1]) for step in (2, 3)),
    }
    measured = {call for call in calls if not call[1]}
    assert measured == {(2, False, "threshold", CAPACITIES[0]), (4, False, "threshold", CAPACITIES[1])}


def test_bits_a_byte_of_each_source_are_those_of_a_plain_model(trainer: Trainer) -> None:
    trainer.train()
    plain: Any = trainer.spec.build(trainer.model_config, seed=0)
    state = trainer.model.state_dict()
    plain.load_state_dict({k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in state.items()})
    plain.eval()
    nats, count = dict[str, float](), dict[str, int]()
    all_nats, all_targets = 0.0, 0
    assert trainer.validator is not None
    for name, batches in trainer.validator._batches.items():
        nats[name], count[name] = 0.0, 0
        for batch in batches:
            with torch.no_grad():
                logits = plain(batch.input_ids, "threshold", max_boundary_rate=CAPACITIES[1]).logits
            picked = -logits.double().log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
            is_byte, valid = batch.targets < 256, batch.targets != PAD_ID
            nats[name] += float(picked[is_byte].sum())
            count[name] += int(is_byte.sum())
            all_nats += float(picked[valid].sum())
            all_targets += int(valid.sum())
    logged = validations(trainer)[-1]
    for name in ("english", "code"):
        assert count[name] > 100
        assert logged[f"validation_bpb/{name}"] == pytest.approx(nats[name] / count[name] / math.log(2), rel=1e-5)
    total = sum(nats.values()) / sum(count.values()) / math.log(2)
    assert logged["validation_bpb"] == pytest.approx(total, rel=1e-5)
    assert logged["validation_loss"] == pytest.approx(all_nats / all_targets, rel=1e-5)
    assert logged["validation_bpb/english"] != pytest.approx(logged["validation_bpb/code"], rel=1e-3)


def test_a_model_that_draws_in_evaluation_leaves_the_numbers_of_training_alone(trainer: Trainer) -> None:
    drawn: list[float] = []
    trainer.model.register_forward_hook(lambda *_: drawn.append(float(torch.rand(()))))
    assert trainer.validator is not None
    before = torch.get_rng_state()
    trainer.validator.run(trainer.model, max_boundary_rate=0.5)
    assert len(set(drawn)) > 1
    assert torch.equal(torch.get_rng_state(), before)
    enough = len(drawn) + 1
    stopped = trainer.validator.run(trainer.model, max_boundary_rate=0.5, should_stop=lambda: len(drawn) >= enough)
    assert stopped is None and len(drawn) == enough
    assert torch.equal(torch.get_rng_state(), before)
