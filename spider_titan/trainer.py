"""The train loop: batch -> forward and backward -> clip -> step -> log. Knows no model and no parallelism."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spider_titan import plugins, startup
from spider_titan.console import add_log_file
from spider_titan.curriculum import Curriculum, PhaseConfig
from spider_titan.data.loader import build_train_loader, build_validation_batches
from spider_titan.data.sources import SplitSource, load_sources
from spider_titan.distributed import World, seed_everything
from spider_titan.metrics import MetricsLogger, RateMeter, format_byte_rate, format_duration
from spider_titan.optim import GroupedAdamW, check_groups
from spider_titan.plugins import PluginContext
from spider_titan.plugins.compile import WarmUp, warm_up
from spider_titan.run_directory import RunDirectory
from spider_titan.spec import Batch, StepContext
from spider_titan.validate import Validator, add_sums

if TYPE_CHECKING:
    from spider_titan.config import JobConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingConfig:
    """The section ``[training]``."""

    steps: int | None = None
    """Optimizer steps; or give byte_budget."""
    byte_budget: int | None = None
    """Bytes to train on in all; or give steps."""
    seq_len: int = 512
    """Bytes a row."""
    local_batch_size: int = 4
    """Rows a rank computes at once."""
    global_batch_size: int | None = None
    """Rows an optimizer step, over all ranks and micro-batches; unset: local_batch_size a rank."""
    max_norm: float = 1.0
    """Bound of the gradient norm."""
    seed: int = 0
    """Seed of the initial weights and of the order of documents."""
    deterministic: bool = False
    """Use deterministic kernels only, on devices where the fastest are not."""

    def __post_init__(self) -> None:
        for name in ("steps", "byte_budget", "seq_len", "local_batch_size", "global_batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value} must be at least 1")
        if self.max_norm <= 0:
            raise ValueError(f"max_norm = {self.max_norm} must be above 0")

    def rows_per_step(self, world_size: int) -> int:
        """Rows of an optimizer step over all ranks."""
        return self.global_batch_size or self.local_batch_size * world_size

    def bytes_per_step(self, world_size: int) -> int:
        """Positions of an optimizer step over all ranks."""
        return self.rows_per_step(world_size) * self.seq_len

    def total_steps(self, world_size: int) -> int:
        """Optimizer steps of the run."""
        if self.steps is not None:
            return self.steps
        assert self.byte_budget is not None, "steps or byte_budget is checked when the configuration is read"
        return -(-self.byte_budget // self.bytes_per_step(world_size))


class Trainer:
    """One training run.

    Building it checks and prepares everything: ValueErrors it raises are the user's to mend, and nothing has been
    trained or overwritten then.

    Args:
        config: The effective configuration.
        config_text: The same as TOML, for the run directory.
        world: The ranks.
    """

    def __init__(self, config: JobConfig, config_text: str, world: World) -> None:
        self.world = world
        self.training = config.training
        self.spec = config.model_spec
        seed_everything(self.training.seed, deterministic=self.training.deterministic)
        self.total_steps = self.training.total_steps(world.size)
        self.bytes_per_step = self.training.bytes_per_step(world.size)
        self.curriculum = Curriculum(
            config.data.phases,
            byte_budget=self.training.byte_budget or self.total_steps * self.bytes_per_step,
            bytes_per_step=self.bytes_per_step,
        )
        sources = load_sources(config.data)
        self.micro_batches, self.batches = self._build_data(config, sources)
        self.validator, self.validation_freq = self._build_validator(config, sources), config.validation.freq
        self.run_directory, self.metrics = self._open_outputs(config, config_text)
        startup.log_run(config, sources, world, self.curriculum, self.total_steps)
        self.plugin_context = PluginContext.from_config(config, world.mesh)
        self.model = self._build_model(config)
        groups = self.spec.param_groups(self.model)
        check_groups(self.model, groups)
        self.optimizer = GroupedAdamW(
            groups, config.optimizer, config.lr_scheduler, self.total_steps, world.sum_over_shards
        )
        startup.log_model(config, self.model, self.bytes_per_step)
        self._warm_up(config)
        self.train_timeout = config.comm.train_timeout_seconds
        self.log_freq = config.metrics.log_freq
        self.mfu_per_rate = startup.mfu_per_byte_rate(config, world)
        self.bytes_seen = 0

    def train(self) -> None:
        """Runs all steps, validates at the end, and closes the run directory."""
        begin = time.perf_counter()
        rate = RateMeter()
        validation: dict[str, float] = {}
        for step in range(self.total_steps):
            phase = self.curriculum.at(step)
            self._log_phase_switch(step)
            context, totals = self._forward_backward(step, phase)
            norms = self.optimizer.clip(self.training.max_norm)
            self.optimizer.step(step)
            self.optimizer.zero_grad()
            plugins.after_step(self.model, self.plugin_context)
            totals = self.world.sum_over_ranks(totals)
            self.spec.after_step(self.model, totals, context)
            self.bytes_seen += context.num_targets
            if step == 0:
                self.world.set_timeout(self.train_timeout)
            rate.count(context.num_targets)
            done = step + 1
            if done % self.log_freq == 0 or done in (1, self.total_steps):
                self._log_step(step, totals, norms, rate)
            if self.validator and (done % self.validation_freq == 0 or done == self.total_steps):
                with rate.paused():
                    validation = self._validate(done, phase)
        self._finish(time.perf_counter() - begin, validation)

    def _forward_backward(self, step: int, phase: PhaseConfig) -> tuple[StepContext, dict[str, Tensor]]:
        """All micro-batches of a step; returns its context and the summed ``LossTerms.sums`` of this rank."""
        batches = [next(self.batches) for _ in range(self.micro_batches)]
        # On the CPU, also beside an accelerator: the device is not waited for, and a rank that hangs can be named.
        local_targets = torch.tensor(sum(batch.num_targets for batch in batches))
        context = StepContext(
            num_targets=int(self.world.sum_over_ranks({"targets": local_targets})["targets"]),
            boundary_mode=phase.boundary_mode,
            boundary_phase=phase.boundary,
            max_boundary_rate=phase.boundary_capacity,
            frozen_groups=self.optimizer.frozen_groups(step),
        )
        totals: dict[str, Tensor] = {}
        for batch in batches:
            terms = self.spec.loss(self.model, batch.to(self.world.device), context)
            terms.total.backward()
            add_sums(totals, terms.sums)
        return context, totals

    def _validate(self, done: int, phase: PhaseConfig) -> dict[str, float]:
        assert self.validator is not None
        values = self.validator.run(self.model, max_boundary_rate=phase.boundary_capacity)
        if self.metrics:
            self.metrics.log_validation(done, values)
        return values

    def _log_step(self, step: int, totals: dict[str, Tensor], norms: dict[str, Tensor], rate: RateMeter) -> None:
        values = self.spec.metrics(totals)
        lap = rate.lap()
        if not self.metrics:
            return
        phase = f"{self.curriculum.index_at(step) + 1}/{len(self.curriculum.phases)}"
        if "boundary_rate" in values:
            phase += f" {self.curriculum.at(step).boundary}"
        lr = self.optimizer.lr(step)
        observed: dict[str, float | str] = {
            **values,
            **{name: float(norm) for name, norm in norms.items()},
            "lr": lr,
            **{f"lr/{group.name}": lr * group.lr_factor for group in self.optimizer.groups},
            "phase": phase,
            "bytes_seen": self.bytes_seen,
            "bytes_per_second": lap.bytes_per_second,
            "eta_seconds": lap.seconds_per_step * (self.total_steps - step - 1),
        }
        if self.mfu_per_rate is not None:
            observed["mfu"] = lap.bytes_per_second * self.mfu_per_rate
        if self.world.device.type == "cuda":
            observed["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.metrics.log_train(step + 1, observed)

    def _log_phase_switch(self, step: int) -> None:
        index = self.curriculum.index_at(step)
        if step == 0 or index != self.curriculum.index_at(step - 1):
            logger.info("phase %s", startup.describe_phase(self.curriculum, index))

    def _finish(self, seconds: float, validation: dict[str, float]) -> None:
        if self.metrics:
            self.metrics.close()
        logger.info(
            "done: %d steps, %s bytes in %s (%s with validation)%s",
            self.total_steps,
            f"{self.bytes_seen:,}",
            format_duration(seconds),
            format_byte_rate(self.bytes_seen / seconds).strip(),
            f", held-out bpb {validation['validation_bpb']:.4f}" if validation else "",
        )
        if self.run_directory:
            logger.info("run directory %s", self.run_directory.path)
            self.run_directory.close()

    def _build_data(self, config: JobConfig, sources: Mapping[str, SplitSource]) -> tuple[int, Iterator[Batch]]:
        """Micro-batches a step, and the endless batches of this rank."""
        rows_per_step = self.training.rows_per_step(self.world.size)
        loader = build_train_loader(
            config.data,
            sources,
            self.curriculum,
            seq_len=self.training.seq_len,
            batch_size=self.training.local_batch_size,
            num_shards=rows_per_step,
            seed=self.training.seed,
            rank=self.world.rank,
            world_size=self.world.size,
        )
        return rows_per_step // self.world.size // self.training.local_batch_size, iter(loader)

    def _build_validator(self, config: JobConfig, sources: Mapping[str, SplitSource]) -> Validator | None:
        if not config.validation.enable:
            return None
        batches = build_validation_batches(
            config.data,
            sources,
            config.data.phases[-1].weights,
            seq_len=self.training.seq_len,
            batch_size=self.training.local_batch_size,
            num_bytes=config.validation.bytes,
            seed=self.training.seed,
            rank=self.world.rank,
            world_size=self.world.size,
        )
        return Validator(self.spec, batches, self.world)

    def _warm_up(self, config: JobConfig) -> None:
        ids = torch.zeros(self.training.local_batch_size, self.training.seq_len, dtype=torch.int64)
        plan = WarmUp(config.data.phases, Batch(ids, ids).to(self.world.device), config.validation.enable)
        warm_up(self.model, self.spec, plan)

    def _open_outputs(self, config: JobConfig, config_text: str) -> tuple[RunDirectory | None, MetricsLogger | None]:
        """The run directory and what is written there; only the reporting rank has them."""
        if not self.world.is_reporter:
            return None, None
        directory = RunDirectory(config.job.dump_folder)
        directory.write_config(config_text)
        add_log_file(directory.log_file)
        tensorboard = directory.tensorboard_folder if config.metrics.enable_tensorboard else None
        metrics = MetricsLogger(directory.metrics_file, total_steps=self.total_steps, tensorboard_folder=tensorboard)
        return directory, metrics

    def _build_model(self, config: JobConfig) -> nn.Module:
        """Meta device -> plugins -> memory -> initial weights, which are the same at every world size."""
        model = self.spec.build(config.model_config, device="meta")
        model = plugins.apply_plugins(model, self.spec, self.plugin_context)
        plugins.materialize(model, self.plugin_context, self.world.device)
        self.spec.init_weights(model, self.training.seed)
        return model.train()
