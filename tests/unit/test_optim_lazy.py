"""Tables whose rows move only when hit, against a plain loop over rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from spider_titan.models.spider.engram import EngramTable
from spider_titan.optim import GroupedAdamW, LRSchedulerConfig, OptimizerConfig
from spider_titan.spec import Batch, ParamGroup, StepContext, get_model_spec

from .reference.tiny import lively_spider, next_ids, packed_rows

SPIDER = get_model_spec("spider")
ROWS, DIM = 12, 3
CONSTANT = LRSchedulerConfig(warmup_steps=0, decay="linear", min_lr_factor=1.0)


def table_and_optimizer(config: OptimizerConfig, *, decays: bool = False) -> tuple[nn.Parameter, GroupedAdamW]:
    table = nn.Parameter(torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0)))
    group = ParamGroup("tables", {"table": table}, lr_factor=5.0, weight_decay=decays, lazy_rows=True)
    return table, GroupedAdamW([group], config, CONSTANT, 100, torch.clone)


def sparse_gradient(step: int) -> tuple[Tensor, set[int]]:
    """Zero but for the rows that are returned; some entries of a row that is hit are zero too."""
    generator = torch.Generator().manual_seed(step)
    hit = set(torch.randperm(ROWS, generator=generator)[: 1 + step % 4].tolist())
    gradient = torch.zeros(ROWS, DIM)
    for row in hit:
        gradient[row] = torch.randn(DIM, generator=generator)
        gradient[row, step % DIM] = 0.0
    return gradient, hit


class LoopReference:
    """One row after another in double precision; the bias correction counts the steps of the table."""

    def __init__(self, table: Tensor, lr: float, decay: float, beta1: float, beta2: float, eps: float) -> None:
        self.rows = [[float(value) for value in row] for row in table]
        self.mean = [[0.0] * DIM for _ in self.rows]
        self.square = [[0.0] * DIM for _ in self.rows]
        self.count, self.lr, self.decay, self.betas, self.eps = 0, lr, decay, (beta1, beta2), eps

    def step(self, gradient: Tensor) -> None:
        self.count += 1
        beta1, beta2 = self.betas
        for index, row in enumerate(gradient.tolist()):
            if not any(row):
                continue
            for k, g in enumerate(row):
                mean = self.mean[index][k] = beta1 * self.mean[index][k] + (1 - beta1) * g
                square = self.square[index][k] = beta2 * self.square[index][k] + (1 - beta2) * g * g
                weight = self.rows[index][k] * (1 - self.lr * self.decay)
                root = math.sqrt(square / (1 - beta2**self.count)) + self.eps
                self.rows[index][k] = weight - self.lr * mean / (1 - beta1**self.count) / root


@pytest.mark.parametrize("decays", [False, True])
def test_steps_equal_a_loop_over_rows(decays: bool) -> None:
    config = OptimizerConfig(lr=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.3)
    table, optimizer = table_and_optimizer(config, decays=decays)
    reference = LoopReference(table.detach(), lr=0.05, decay=0.3 if decays else 0.0, beta1=0.8, beta2=0.9, eps=1e-6)
    never_hit = set(range(ROWS))
    initial = table.detach().clone()
    for step in range(10):
        gradient, hit = sparse_gradient(step)
        never_hit -= hit
        before = [table.detach().clone(), *(value.clone() for value in optimizer.state_tensors().values())]
        table.grad = gradient.clone()
        optimizer.step(step)
        reference.step(gradient)
        state = optimizer.state_tensors()
        torch.testing.assert_close(table.detach().double(), torch.tensor(reference.rows).double(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(state["table.exp_avg"], torch.tensor(reference.mean), rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(state["table.exp_avg_sq"], torch.tensor(reference.square), rtol=1e-5, atol=1e-7)
        assert torch.equal(table.grad, gradient)
        idle = [row for row in range(ROWS) if row not in hit]
        now = [table.detach(), *state.values()]
        for old, new in zip(before, now, strict=False):
            if old.ndim:
                assert torch.equal(old[idle], new[idle])
                assert not torch.equal(old[[*hit]], new[[*hit]])
    assert never_hit and torch.equal(table[[*never_hit]], initial[[*never_hit]])


def test_with_every_row_hit_it_is_torchs_adamw() -> None:
    config = OptimizerConfig(lr=0.01)
    table, optimizer = table_and_optimizer(config)
    other = nn.Parameter(table.detach().clone())
    adamw = torch.optim.AdamW([other], lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    for step in range(5):
        table.grad = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(step))
        other.grad = table.grad.clone()
        optimizer.step(step)
        adamw.step()
        torch.testing.assert_close(table, other, rtol=1e-6, atol=1e-7)


def test_a_row_first_hit_late_takes_the_step_of_the_documented_size() -> None:
    table, optimizer = table_and_optimizer(OptimizerConfig(lr=0.01))
    for step in range(400):
        table.grad = torch.zeros(ROWS, DIM)
        table.grad[0] = 1.0
        optimizer.step(step)
    before = table.detach().clone()
    table.grad = torch.zeros(ROWS, DIM)
    table.grad[7] = -2.0
    optimizer.step(400)
    moved = (table.detach() - before)[7]
    assert moved.tolist() == pytest.approx([0.05 * (1 - 0.9) / math.sqrt(1 - 0.95)] * DIM, rel=1e-4)


def test_a_gradient_that_is_not_finite_counts_as_a_hit() -> None:
    table, optimizer = table_and_optimizer(OptimizerConfig())
    table.grad = torch.zeros(ROWS, DIM)
    table.grad[3, 1] = math.nan
    optimizer.step(0)
    assert table[3].isnan().tolist() == [False, True, False]
    assert table.isfinite().sum() == ROWS * DIM - 1


@pytest.mark.parametrize("decays", [False, True])
def test_a_skipped_step_is_as_if_it_had_not_been(decays: bool) -> None:
    config = OptimizerConfig(lr=0.01, weight_decay=0.3)
    table, optimizer = table_and_optimizer(config, decays=decays)
    other, without = table_and_optimizer(config, decays=decays)
    no, yes = torch.tensor(False), torch.tensor(True)
    for step in range(8):
        skipped = step in (0, 3, 4)
        gradient, _ = sparse_gradient(step)
        table.grad = torch.full_like(table, (math.nan, math.inf)[step % 2]) if skipped else gradient.clone()
        optimizer.step(step, yes if skipped else no)
        if not skipped:
            other.grad = gradient
            without.step(step)
        assert torch.equal(table, other)
        for name, value in without.state_tensors().items():
            assert torch.equal(value, optimizer.state_tensors()[name]), name
    assert without.state_tensors()["table.step"] == 5
    table.grad = other.grad = gradient
    optimizer.step(8)
    without.step(8)
    assert torch.equal(table, other)


def test_groups_of_anything_but_matrices_are_refused() -> None:
    group = ParamGroup("tables", {"table": nn.Parameter(torch.zeros(3))}, lazy_rows=True)
    with pytest.raises(ValueError, match=r"lazy_rows holds matrices that are sharded by rows; \[3\], \(\) is none"):
        GroupedAdamW([group], OptimizerConfig(), CONSTANT, 1, torch.clone)


def test_spiders_tables_move_in_the_rows_that_micro_batches_looked_up() -> None:
    """Through the real loss, two micro-batches a step; every row that was looked up moves, and no other."""
    model = lively_spider()
    optimizer = GroupedAdamW(SPIDER.param_groups(model), OptimizerConfig(lr=0.01), CONSTANT, 10, torch.clone)
    looked_up: dict[str, set[int]] = {}

    def remember(module: nn.Module, ngrams: tuple[Tensor, ...], memory: object) -> None:
        assert isinstance(module, EngramTable)
        looked_up.setdefault(f"engram.layers.{module.layer}.embed.weight", set()).update(
            module.rows(ngrams[0]).flatten().tolist()
        )

    for module in model.modules():
        if isinstance(module, EngramTable):
            module.register_forward_hook(remember)
    rows = packed_rows()
    for step in range(3):
        looked_up.clear()
        before = {name: model.get_parameter(name).detach().clone() for name in optimizer.names() if "embed" in name}
        for shift in range(2):
            ids = rows.roll(7 * step + shift, 1)
            batch = Batch(ids, next_ids(ids))
            context = StepContext(2 * batch.num_targets, "topk", "fixed", 0.34)
            SPIDER.loss(model, batch, context).total.backward()
        grads = {name: model.get_parameter(name).grad for name in looked_up}
        optimizer.clip(1.0)
        optimizer.step(step)
        for name, hit in looked_up.items():
            grad, moved = grads[name], (model.get_parameter(name).detach() != before[name]).any(1)
            assert grad is not None
            with_gradient = {int(row) for row in (grad != 0).any(1).nonzero()}
            # Slots without a segment look up blank rows, whose gradient is zero.
            assert {int(row) for row in moved.nonzero()} == with_gradient <= hit
            assert 0 < len(with_gradient) < len(before[name])
        optimizer.zero_grad()
