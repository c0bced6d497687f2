"""Steps that do not log wait for no device: no operator of theirs reads a value back or copies one from the host.

On the CPU nothing waits. But the operators are the same, and on the meta device so are the copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spider_titan.config import load_config, to_toml
from spider_titan.distributed import CommConfig, ParallelismConfig, World, join_world
from spider_titan.models.byte_transformer.model import ByteTransformerConfig
from spider_titan.models.common.attention import _flex_mask
from spider_titan.models.spider import SpiderConfig
from spider_titan.optim import GroupedAdamW, LRSchedulerConfig, OptimizerConfig
from spider_titan.spec import Batch, StepContext, get_model_spec
from spider_titan.trainer import Trainer
from spider_titan.watch import unless

from .reference.tiny import (
    BYTE_TRANSFORMER_TOML,
    SPIDER_TOML,
    byte_transformer_config,
    spider_config,
)

RUN = """
[training]
steps = 8
seq_len = 64
local_batch_size = 2
global_batch_size = 4
[optimizer]
implementation = "fused"
[lr_scheduler]
warmup_steps = 2
[validation]
enable = false
[metrics]
log_freq = 100
enable_tensorboard = false
[[data.phases]]
until = 0.6
weights = { english = 1.0 }
boundary = "fixed"
[[data.phases]]
until = 1.0
weights = { english = 1.0 }
"""
ATEN = torch.ops.aten
READS = {
    ATEN._local_scalar_dense.default,
    ATEN.nonzero.default,
    ATEN.masked_select.default,
    ATEN.equal.default,
    ATEN._unique2.default,
    ATEN.repeat_interleave.Tensor,
}
"""Their result, or its shape, depends on values that the host must know."""


class WaitError(AssertionError):
    """An operator that an accelerator would be waited for."""


class NoWaiting(TorchDispatchMode):
    """Raises at operators that read a value, copy between devices, or make a tensor of the host's data."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        out = func(*args, **(kwargs or {}))
        if func in READS:
            raise WaitError(f"{func} reads a value")
        if func is ATEN.index.Tensor and any(leaf.dtype == torch.bool for leaf in given[1:]):
            raise WaitError("a mask is an index")
        if func is ATEN.lift_fresh.default:
            raise WaitError(f"a tensor is made of {given[0]}")
        if len({leaf.device for leaf in (*given, *tree_leaves(out)) if isinstance(leaf, Tensor)}) > 1:
            raise WaitError(f"{func} copies between devices")
        return out


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world(ParallelismConfig(), CommConfig()) as world:
        yield world


def make_trainer(world: World, folder: Path, model: str, *options: str) -> Trainer:
    file = folder / "run.toml"
    file.write_text(f"{model}{'router_bias_rate = 0.01' if model == SPIDER_TOML else ''}\n{RUN}")
    config = load_config(["--job.config_file", str(file), "--job.dump_folder", str(folder / "run"), *options])
    return Trainer(config, to_toml(config), world)


@pytest.mark.parametrize("model", [SPIDER_TOML, BYTE_TRANSFORMER_TOML], ids=["spider", "byte_transformer"])
def test_a_step_reads_nothing_back(world: World, tmp_path: Path, model: str) -> None:
    """From the first micro-batch's forward to the rules after the step, in fixed and adaptive phases."""
    trainer = make_trainer(world, tmp_path, model)
    forward_backward, count, watched = trainer._forward_backward, trainer._count, []
    with ExitStack() as stack:

        def begin(*args: Any) -> Any:
            stack.enter_context(NoWaiting())
            return forward_backward(*args)

        def end(*args: Any) -> None:
            stack.pop_all().close()
            watched.append(trainer.progress.step)
            count(*args)

        trainer._forward_backward, trainer._count = begin, end  # type: ignore[method-assign]
        trainer.train()
    assert watched == [*range(8)]


@pytest.mark.parametrize("config", [spider_config(), byte_transformer_config()], ids=["spider", "byte_transformer"])
@pytest.mark.parametrize("phase", ["fixed", "adaptive"])
def test_a_step_copies_nothing_to_the_device(config: SpiderConfig | ByteTransformerConfig, phase: Any) -> None:
    """On the meta device, which has no fused update, but that of tables; a first forward may make copies to keep."""
    spec = get_model_spec("spider" if isinstance(config, SpiderConfig) else "byte_transformer")
    model = spec.build(config, device="meta").train()
    groups = spec.param_groups(model)
    clipper, updater = (
        GroupedAdamW(chosen, OptimizerConfig(), LRSchedulerConfig(), 10, torch.clone)
        for chosen in (groups, [group for group in groups if group.lazy_rows])
    )
    ids = torch.zeros(2, 64, dtype=torch.int64, device="meta")
    context = StepContext(100, "topk" if phase == "fixed" else "threshold", phase, 0.4)

    def step() -> None:
        terms = spec.loss(model, Batch(ids, ids), context)
        terms.total.backward()
        clipper.clip(1.0)
        skip = ~terms.total.detach().isfinite()
        updater.step(0, skip)
        clipper.zero_grad()
        with unless(skip, model):
            spec.after_step(model, terms.sums, context)

    step()
    with NoWaiting():
        step()


def test_the_mask_of_cudas_kernel_reads_nothing_back() -> None:
    documents = torch.arange(300).div(100, rounding_mode="floor").expand(2, -1)
    with NoWaiting():
        _flex_mask(documents, 64)


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.item(),
        lambda x: bool(x > 0),
        lambda x: x[None].nonzero(),
        lambda x: x[None][x[None] > 0],
        lambda x: torch.tensor(3, device=x.device),
        lambda x: x.new_tensor([3]),
        lambda x: torch.arange(3).repeat_interleave(torch.arange(3)),
        lambda x: x.to("meta"),
    ],
)
def test_what_waits_is_noticed(wait: Any) -> None:
    with pytest.raises(WaitError), NoWaiting():
        wait(torch.ones(()))


@pytest.mark.gpu
@pytest.mark.parametrize("model", [SPIDER_TOML, BYTE_TRANSFORMER_TOML], ids=["spider", "byte_transformer"])
def test_a_step_on_a_device_does_not_wait(world: World, tmp_path: Path, model: str) -> None:
    """In either phase, once all kernels are compiled."""
    # In fp32 the grouped products of experts wait within torch.
    trainer = make_trainer(world, tmp_path, model, "--precision.mode", "bf16")
    train_step, watched = trainer._train_step, []

    def watching(**arguments: Any) -> bool:
        if trainer.progress.step in (3, 4, 6):
            watched.append(trainer.progress.step)
            torch.cuda.set_sync_debug_mode("error")
        try:
            return train_step(**arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    trainer._train_step = watching  # type: ignore[method-assign]
    trainer.train()
    assert watched == [3, 4, 6]
