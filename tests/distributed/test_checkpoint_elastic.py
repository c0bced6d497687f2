"""A run of four legs on 4, 2, 1 and 3 ranks, and one of two ranks that is stopped in several ways."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from spider_titan.checkpoint import folders, tensors
from spider_titan.config import load_config, to_toml
from spider_titan.distributed import join_world
from spider_titan.interrupt import Stopped, StopRequest
from spider_titan.run_directory import DiskError
from spider_titan.trainer import Trainer

from .ranks import full, spawn, spider_toml
from .test_world_sizes import RUN

CHECKPOINT = """
[checkpoint]
enable = true
interval = 2
"""
LEGS = [(4, 0, 2), (2, 2, 4), (1, 4, 6), (3, 6, 8)]
"""Ranks, first step, last step."""
TIMES = {"bytes_per_second", "eta_seconds", "loader_wait"}


class StopAtStep(StopRequest):
    """A wish that one rank has at a step."""

    def __init__(self, rank: int, step: int) -> None:
        super().__init__()
        self.step, self.is_mine, self.trainer = step, rank == 1, None

    @property
    def reason(self) -> str:
        return "enough" if self.is_mine and self.trainer and self.trainer.progress.step >= self.step else ""


def make_trainer(folder: Path, name: str, world: Any, *options: str, stop: StopAtStep | None = None) -> Trainer:
    file = folder / "run.toml"
    config = load_config(["--job.config_file", str(file), "--job.dump_folder", str(folder / name), *options])
    trainer = Trainer(config, to_toml(config), world, stop)
    if stop:
        stop.trainer = trainer
    return trainer


def sections(*options: str) -> Any:
    return load_config(["--training.steps", "1", *options])


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    named = {**tensors.model_tensors(trainer.model)}
    named |= {tensors.OPTIMIZER + name: value for name, value in trainer.optimizer.state_tensors().items()}
    return {name: full(value).detach().clone() for name, value in named.items()}


def elastic_leg(rank: int, folder: str, ranks: int, first: int, last: int) -> None:
    """One leg; leaves the rows it read, and the whole state at its begin and end."""
    with join_world(sections().parallelism, sections().comm) as world:
        options = ("--training.local_batch_size", "1", "--data.num_workers", str(ranks % 2))
        trainer = make_trainer(Path(folder), "elastic", world, *options)
        assert trainer.progress.step == first
        begin, rows = state_of(trainer), []
        real = trainer._forward_backward

        def recording(step: int, batches: Any, num_targets: int) -> Any:
            if step == last:
                raise Stopped("the end of the leg")
            rows.extend((step, batch.input_ids[0].tolist()) for batch in batches)
            return real(step, batches, num_targets)

        trainer._forward_backward = recording  # type: ignore[method-assign]
        try:
            trainer.train()
        except Stopped:
            trainer._close()
        record = {"begin": begin, "end": state_of(trainer), "rows": rows}
        torch.save(record, Path(folder) / f"leg{first}.{rank}.pt")


def two_ranks(rank: int, folder: str) -> None:
    """Runs on two ranks: unbroken, stopped by a wish of rank 1 alone, and with a disk that fails on rank 1."""
    for name, stops in {"unbroken": [], "stopped": [3, 5]}.items():
        for step in [*stops, None]:
            with join_world(sections().parallelism, sections().comm) as world:
                stop = StopAtStep(rank, step) if step else None
                trainer = make_trainer(Path(folder), name, world, "--training.local_batch_size", "3", stop=stop)
                try:
                    trainer.train()
                    assert step is None
                except Stopped:
                    assert trainer.progress.step == step
    with join_world(sections().parallelism, sections().comm) as world:
        trainer = make_trainer(Path(folder), "failing", world, "--training.local_batch_size", "3")
        if rank == 1:

            def fail(*args: Any) -> None:
                raise OSError(5, "Input/output error")

            FileSystemWriter.write_data = fail
        with pytest.raises(DiskError, match=r"cannot write the checkpoint .*step-2\.partial .*: Input/output error"):
            trainer.train()
        torch.save(folders.steps_in(Path(folder) / "failing" / "checkpoint"), Path(folder) / f"failing.{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs."""
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "run.toml").write_text(f"{spider_toml()}{RUN}{CHECKPOINT}")
    for ranks, first, last in LEGS:
        spawn(ranks, elastic_leg, str(folder), ranks, first, last)
    spawn(2, two_ranks, str(folder))
    return folder


def leg(folder: Path, first: int, rank: int = 0) -> Any:
    return torch.load(folder / f"leg{first}.{rank}.pt", weights_only=True)


def test_state_is_exact_on_another_number_of_ranks(folder: Path) -> None:
    for (ranks, before, _), (next_ranks, first, _) in itertools.pairwise(LEGS):
        ends = [leg(folder, before, rank)["end"] for rank in range(ranks)]
        for rank in range(next_ranks):
            begin = leg(folder, first, rank)["begin"]
            assert begin.keys() == ends[0].keys()
            for end in ends:
                assert all(torch.equal(begin[name], end[name]) for name in begin)


def test_every_row_is_read_once_and_in_its_step(folder: Path) -> None:
    """The rows of all legs against those of a run on two ranks that was never stopped."""
    rows = [row for ranks, first, _ in LEGS for rank in range(ranks) for row in leg(folder, first, rank)["rows"]]
    assert len(rows) == 8 * 12
    assert len({tuple(ids) for _, ids in rows}) == len(rows)
    seen = {line["step"]: line["loss"] for line in logged(folder / "elastic") if "loss" in line}
    expected = {line["step"]: line["loss"] for line in logged(folder / "unbroken") if "loss" in line}
    assert seen.keys() == expected.keys() == set(range(1, 9))
    for step, loss in expected.items():
        assert seen[step] == pytest.approx(loss, rel=2e-5)


def test_ranks_agree_to_stop_and_go_on_to_the_bit(folder: Path) -> None:
    assert logged(folder / "stopped") == logged(folder / "unbroken")


def test_a_disk_that_fails_on_one_rank_ends_all(folder: Path) -> None:
    for rank in range(2):
        assert torch.load(folder / f"failing.{rank}.pt", weights_only=True) == []


def logged(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]
