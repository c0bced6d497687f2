"""What the first line of metrics.jsonl says of a step of 2 ranks x 2 micro-batches, against a plain model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spider_titan.config import load_config, to_toml
from spider_titan.distributed import join_world
from spider_titan.spec import Batch, StepContext, get_model_spec
from spider_titan.trainer import Trainer
from spider_titan.vocabulary import PAD_ID

from .ranks import TINY_SPIDER, spawn, spider_toml

# A cosine from 3e-3 to a tenth of it, at the end of its first quarter.
LR = 3e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
LR_FACTORS = {"boundary_predictor": 0.1, "boundary_predictor_no_decay": 0.1, "engram_tables": 5.0}
TERMS: dict[str, Any] = {
    "router_z_weight": 0.1,
    "act_ponder_weight": 0.2,
    "router_aux_weight": 0.3,
    "boundary_weight": 0.7,
    "boundary_lr_factor": 0.1,
}
RUN = """
[training]
steps = 4
seq_len = 64
local_batch_size = 2
global_batch_size = 8
max_norm = 0.01
[optimizer]
lr = 3e-3
[lr_scheduler]
warmup_steps = 0
[validation]
enable = false
[metrics]
log_freq = 1
enable_tensorboard = false
[[data.phases]]
until = 1.0
weights = { english = 1.0 }
boundary = "fixed"
"""


def train(rank: int, folder: str) -> None:
    """One run; every rank leaves its batches of the first step."""
    options = ("--job.config_file", str(Path(folder) / "run.toml"), "--job.dump_folder", str(Path(folder) / "run"))
    config = load_config(list(options))
    with join_world(config.parallelism, config.comm) as world:
        trainer = Trainer(config, to_toml(config), world)
        real, batches = trainer.batches, list[Batch]()
        trainer.batches = iter(lambda: batches.append(next(real)) or batches[-1], None)  # type: ignore[assignment]
        trainer.train()
        first = batches[: trainer.micro_batches]
        torch.save([(batch.input_ids, batch.targets) for batch in first], Path(folder) / f"{rank}.pt")


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Batch]:
    """The line of the first step, and all its rows."""
    folder = tmp_path_factory.mktemp("logged")
    terms = "\n".join(f"{name} = {value}" for name, value in TERMS.items())
    (folder / "run.toml").write_text(f"{spider_toml()}{terms}\n{RUN}")
    spawn(2, train, str(folder))
    parts = [part for rank in range(2) for part in torch.load(folder / f"{rank}.pt")]
    assert [part[0].shape for part in parts] == [(2, 64)] * 4
    line = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[0])
    return line, Batch(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def test_the_first_line_is_what_a_plain_model_says(step: tuple[dict[str, Any], Batch]) -> None:
    line, batch = step
    spec = get_model_spec("spider")
    plain: Any = spec.build(spec.config_class(**TINY_SPIDER, **TERMS), seed=0).train()
    context = StepContext(batch.num_targets, boundary_mode="topk", boundary_phase="fixed", max_boundary_rate=0.34)
    terms = spec.loss(plain, batch, context)
    terms.total.backward()
    logits = plain(batch.input_ids, "topk", max_boundary_rate=0.34).logits.detach()
    nats = -logits.double().log_softmax(-1).gather(-1, batch.targets[..., None])[..., 0]
    is_byte = batch.targets < 256

    expected = {
        "loss": terms.total.item(),
        "lm_loss": nats[batch.targets != PAD_ID].mean().item(),
        "bpb": nats[is_byte].mean().item() / math.log(2),
    }
    for name in ("boundary", "router_aux", "router_z", "ponder"):
        expected[f"{name}_loss"] = terms.sums[name].item() / batch.num_targets
    for name, value in expected.items():
        assert value > 0.0 and line[name] == pytest.approx(value, rel=2e-5), name
    assert line["bytes_seen"] == batch.num_targets
    assert line["loss"] == pytest.approx(
        line["lm_loss"]
        + sum(TERMS[f"{name}_weight"] * line[f"{name}_loss"] for name in ("boundary", "router_aux"))
        + TERMS["router_z_weight"] * line["router_z_loss"]
        + TERMS["act_ponder_weight"] * line["ponder_loss"],
        rel=1e-6,
    )

    all_squares = 0.0
    for group in spec.param_groups(plain):
        squares = sum(square_of(parameter.grad) for parameter in group.parameters.values())
        all_squares += squares
        assert line[f"grad_norm/{group.name}"] == pytest.approx(math.sqrt(squares), rel=1e-4), group.name
        assert line[f"lr/{group.name}"] == pytest.approx(LR * LR_FACTORS.get(group.name, 1.0)), group.name
    assert line["grad_norm"] == pytest.approx(math.sqrt(all_squares), rel=1e-4)
    assert line["grad_norm"] > 1.0, "the bound of 0.01 was in force, and norms are from before it"
    assert line["lr"] == pytest.approx(LR)
    assert line["loader_wait"] >= 0.0


def square_of(grad: Tensor | None) -> float:
    return 0.0 if grad is None else float(grad.double().square().sum())
