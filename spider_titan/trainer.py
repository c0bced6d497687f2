"""The train loop: batch -> forward and backward -> clip -> step -> log. Knows no model and no parallelism."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from spider_titan import plugins, startup
from spider_titan.checkpoint.manager import CheckpointManager
from spider_titan.checkpoint.training import Progress, load_weights, read_progress, restore, snapshot
from spider_titan.console import add_log_file
from spider_titan.curriculum import Curriculum
from spider_titan.data.documents import TrainingSource
from spider_titan.data.loader import TrainLoader, build_train_loader, build_validation_batches, merge_cursors
from spider_titan.data.problems import EndOfData
from spider_titan.data.rows import epochs, shards
from spider_titan.data.sources import load_sources
from spider_titan.distributed import World, seed_everything
from spider_titan.interrupt import Stopped, StopRequest, WaitInterrupted
from spider_titan.metrics import MetricsLogger, RateMeter, format_byte_rate, format_duration
from spider_titan.monitor import RecurrentMonitor
from spider_titan.optim import GroupedAdamW, check_groups
from spider_titan.plugins import PluginContext
from spider_titan.plugins.compile import WarmUp, warm_up
from spider_titan.profiling import Profiler
from spider_titan.run_directory import RunDirectory, checkpoint_folder, folder_of
from spider_titan.samples import expert_map, segmented_text
from spider_titan.spec import Batch, StepContext
from spider_titan.validate import Validator, add_sums
from spider_titan.wandb_log import WeightsAndBiases
from spider_titan.watch import StepWatch, unless

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
    max_skipped_steps: int = 10
    """Steps in a row whose loss or gradient is not finite, each of them skipped, after which the run ends."""
    seed: int = 0
    """Seed of the initial weights and of the order of documents."""
    deterministic: bool = False
    """Use deterministic kernels only, on devices where the fastest are not."""

    def __post_init__(self) -> None:
        for name in ("steps", "byte_budget", "seq_len", "local_batch_size", "global_batch_size", "max_skipped_steps"):
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
        stop_request: Asked before every step and every batch of a validation; default: nothing stops the run.
    """

    def __init__(
        self, config: JobConfig, config_text: str, world: World, stop_request: StopRequest | None = None
    ) -> None:
        self.world, self.stop_request = world, stop_request or StopRequest()
        self.training = config.training
        self.spec, self.model_config = config.model_spec, config.model_config
        seed_everything(self.training.seed, deterministic=self.training.deterministic)
        self.total_steps = self.training.total_steps(world.size)
        self.bytes_per_step = self.training.bytes_per_step(world.size)
        self.curriculum = Curriculum(
            config.data.phases,
            byte_budget=self.training.byte_budget or self.total_steps * self.bytes_per_step,
            bytes_per_step=self.bytes_per_step,
        )
        self.profiler = self._build_profiler(config)
        sources = self.sources = load_sources(config.data)
        self.validator, self.validation_freq = self._build_validator(config, sources), config.validation.freq
        self.run_directory = self._open_directory(config, config_text)
        self.checkpoints = self._open_checkpoints(config, config_text)
        self.last_validation: dict[str, float] = {}
        self.value_to_compare, self.best_value = math.inf, math.inf
        """Of the last step, and the lowest so far: held-out bits per byte, or without validation the loss."""
        self.bytes_before = 0
        self.progress, saved_step = self._find_progress()
        self.micro_batches, self.batches = self._build_data(config, sources)
        self.metrics = self._open_metrics(config, config_text)
        startup.log_run(config, sources, world, self.curriculum, self.total_steps)
        self.plugin_context = PluginContext.from_config(config, world.mesh)
        self.model = self._build_model(config)
        groups = self.spec.param_groups(self.model)
        check_groups(self.model, groups)
        self.optimizer = GroupedAdamW(
            groups, config.optimizer, config.lr_scheduler, self.total_steps, world.sum_over_shards
        )
        self.watch = StepWatch(world)
        self.monitor = RecurrentMonitor(config.monitor, self.progress.monitor, self._warn)
        self.sample_freq = config.metrics.log_freq * config.monitor.sample_freq
        self.last_rows: tuple[Tensor, Tensor | None] | None = None
        startup.log_model(config, self.model, self.optimizer, self.bytes_per_step)
        self._restore(config, saved_step)
        self._warm_up(config)
        self.train_timeout = config.comm.train_timeout_seconds
        self.log_freq = config.metrics.log_freq
        self.peak_flops = startup.peak_flops(self.plugin_context.precision, world)

    def train(self) -> None:
        """Runs the steps that are left, validates at the end, and closes the run directory.

        Raises:
            Stopped: If a signal or the time limit asked for it; the state is saved.
            NonFiniteError: If ``training.max_skipped_steps`` steps in a row had to be skipped.
        """
        begin, first_step = time.perf_counter(), self.progress.step
        self.rate, self.loader_waits = RateMeter(wait_for_device=self.world.wait_for_device), list[float]()
        if self.checkpoints and self.checkpoints.config.create_seed_checkpoint:
            self._save()
            self._finish(time.perf_counter() - begin)
            return
        if not self.progress.validated:
            # The run was stopped within this validation.
            self._validate()
            self._save(self._reasons_to_keep())
        if first_step >= self.total_steps:
            logger.info("nothing is left to do: step %d is saved; more training.steps extend the run", first_step)
        with self.profiler or nullcontext():
            while self.progress.step < self.total_steps:
                if not self._train_step(is_first=self.progress.step == first_step):
                    self._end_early()
                    break
        self._finish(time.perf_counter() - begin)

    def _train_step(self, *, is_first: bool) -> bool:
        """Returns whether there was data for it."""
        step = self.progress.step
        self._log_phase_switch(step)
        batches, num_targets = self._next_batches()
        if not batches:
            return False
        context, loss, totals = self._forward_backward(step, batches, num_targets)
        norms = self.optimizer.clip(self.training.max_norm)
        totals, skip = self.watch.add_up(step, loss, totals, norms)
        self.optimizer.step(step, skip)
        self.optimizer.zero_grad()
        plugins.after_step(self.model, self.plugin_context)
        with unless(skip, self.model):
            self.spec.after_step(self.model, totals, context)
        self._count(batches, num_targets)
        self._review_steps(wait=False)
        if is_first:
            self.world.set_timeout(self.train_timeout)
        flops = self.spec.training_flops(self.model_config, self.training.seq_len, context.num_loops)
        self.rate.count(num_targets, flops * num_targets)
        done = self.progress.step
        if done % self.log_freq == 0 or done in (1, self.total_steps):
            self._log_step(step, totals, norms, self.rate)
        if not self.progress.validated:
            self._validate()
        self._save_if_due(totals)
        if self.profiler:
            self.profiler.step(done, self.rate.paused)
        return True

    def _end_early(self) -> None:
        """What the last step does, at the end of data that is not to be repeated."""
        self.total_steps = self.progress.step
        if self.validator and self.progress.step % self.validation_freq:
            self._validate()
        if self.checkpoints:
            self._save(self._reasons_to_keep())

    def _next_batches(self) -> tuple[list[Batch], int]:
        """This rank's micro-batches of a step, and the valid targets of those of all ranks; none if data is at its end.

        It is here that ranks agree to stop: nothing of the step has been computed yet.
        """
        batches, ended, begin = [], "", time.perf_counter()
        try:
            with self.stop_request.interrupting():
                batches = [next(self.batches) for _ in range(self.micro_batches)]
        except EndOfData as end:
            ended = str(end)
        except WaitInterrupted:
            logger.info("stopped waiting for data")
        wait = time.perf_counter() - begin
        # On the CPU, also beside an accelerator: the device is not waited for, and a rank that hangs can be named.
        mine = {
            "targets": torch.tensor(sum(batch.num_targets for batch in batches)),
            "stop": torch.tensor(int(bool(self.stop_request.reason))),
            "ended": torch.tensor(int(bool(ended))),
            "wait": torch.tensor(wait / self.world.size),
        }
        sums = self.world.sum_over_ranks(mine)
        self.loader_waits.append(float(sums["wait"]))
        if sums["stop"]:
            self._stop()
        if sums["ended"]:
            logger.info(
                "the run ends after step %d: %s", self.progress.step, ended or "data of another rank is at its end"
            )
            return [], 0
        return batches, int(sums["targets"])

    def _forward_backward(
        self, step: int, batches: list[Batch], num_targets: int
    ) -> tuple[StepContext, Tensor, dict[str, Tensor]]:
        """All micro-batches of a step; returns its context, and the loss and the ``LossTerms.sums`` of this rank."""
        phase, draw = self.curriculum.at(step), self.spec.draw_loops
        context = StepContext(
            num_targets=num_targets,
            boundary_mode=phase.boundary_mode,
            boundary_phase=phase.boundary,
            max_boundary_rate=phase.boundary_capacity,
            frozen_groups=self.optimizer.frozen_groups(step),
            num_loops=draw(self.model_config, self.training.seed, step) if draw else None,
        )
        loss, totals = torch.zeros((), device=self.world.device), dict[str, Tensor]()
        for batch in batches:
            terms = self.spec.loss(self.model, batch.to(self.world.device), context)
            terms.total.backward()
            loss = loss + terms.total.detach()
            add_sums(totals, terms.sums)
        self.last_rows = batch.input_ids, terms.boundaries
        return context, loss, totals

    def _review_steps(self, *, wait: bool) -> None:
        for report in self.watch.review(self.progress, self.training.max_skipped_steps, wait=wait):
            if not report.skipped:
                self.monitor.observe_loss(report.step + 1, report.loss)

    def _warn(self, text: str) -> None:
        if self.world.is_reporter:
            logger.warning("%s", text)

    def _count(self, batches: list[Batch], num_targets: int) -> None:
        progress = self.progress
        progress.step += 1
        progress.bytes_seen += num_targets
        for batch in batches:
            merge_cursors(progress.cursors, batch.position)
        is_due = progress.step % self.validation_freq == 0 or progress.step == self.total_steps
        progress.validated = not (self.validator and is_due)

    def _validate(self) -> None:
        """Measures the model after the last step; the result is kept if it is the best so far."""
        assert self.validator is not None
        capacity = self.curriculum.at(self.progress.step - 1).boundary_capacity
        with self.rate.paused():
            values = self.validator.run(self.model, max_boundary_rate=capacity, should_stop=self._agree_to_stop)
        if values is None:
            self._stop()
            return
        self.progress.validated = True
        self.last_validation, self.value_to_compare = values, values["validation_bpb"]
        if self.metrics:
            self.metrics.log_validation(self.progress.step, values)

    def _agree_to_stop(self) -> bool:
        return bool(self.world.sum_over_ranks({"stop": torch.tensor(int(bool(self.stop_request.reason)))})["stop"])

    def _stop(self) -> None:
        """Saves and ends the run, on all ranks alike."""
        reason = self.stop_request.reason or "another rank was asked to stop"
        assert self.checkpoints is not None, "without a place to save nobody listens to such wishes"
        if not self.checkpoints.has(self.progress.step):
            self._save()
        self.checkpoints.close()
        self._close()
        raise Stopped(f"{reason}; the state after step {self.progress.step} is saved: the same command goes on")

    def _save_if_due(self, totals: dict[str, Tensor]) -> None:
        if self.checkpoints is None:
            return
        is_due = self.progress.step % self.checkpoints.config.interval == 0 or self.progress.step == self.total_steps
        if is_due and not self.validator:
            self.value_to_compare = self.spec.metrics(totals)["loss"]
        kept_as = self._reasons_to_keep()
        if self.checkpoints.config.keep_epoch_ends and self._epoch_has_ended():
            self.progress.epochs += 1
            kept_as[f"epoch-{self.progress.epochs}"] = {}
        if is_due or kept_as:
            self._save(kept_as)

    def _epoch_has_ended(self) -> bool:
        """Whether every shard has read its part of every source of the phase once more, over all ranks."""
        phase, progress = self.curriculum.at(self.progress.step - 1), self.progress
        behind = 0
        for name in (name for name, weight in phase.weights.items() if weight > 0):
            source, cursors = self.sources[name], progress.cursors.get(name, {})
            behind += sum(
                shard not in cursors or source.epoch(cursors[shard].position) <= progress.epochs
                for shard in self._shards(name)
            )
        return not self.world.sum_over_ranks({"behind": torch.tensor(behind)})["behind"]

    def _shards(self, source: str) -> range:
        return shards(self.sources[source], self.progress.num_rows, self.world.rank, self.world.size)

    def _reasons_to_keep(self) -> dict[str, dict[str, Any]]:
        """Entries of ``kept.json`` for the last step."""
        assert self.checkpoints is not None
        kept_as: dict[str, dict[str, Any]] = {"final": {}} if self.progress.step == self.total_steps else {}
        if self.checkpoints.config.keep_best and self.value_to_compare < self.best_value:
            self.best_value = self.value_to_compare
            kept_as["best"] = {"value": self.best_value}
        return kept_as

    def _save(self, kept_as: dict[str, dict[str, Any]] | None = None) -> None:
        assert self.checkpoints is not None
        self._review_steps(wait=True)
        with self.rate.paused():
            self.checkpoints.save(snapshot(self.progress, self.model, self.optimizer, self.world), kept_as=kept_as)

    def _log_step(self, step: int, totals: dict[str, Tensor], norms: dict[str, Tensor], rate: RateMeter) -> None:
        values = self.spec.metrics(totals)
        self._review_steps(wait=True)
        self.monitor.observe(step + 1, values, totals)
        lap, loader_wait = rate.lap(), sum(self.loader_waits) / len(self.loader_waits)
        self.loader_waits.clear()
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
            "skipped_steps": self.progress.skipped_steps,
            "bytes_seen": self.progress.bytes_seen,
            "bytes_per_second": lap.bytes_per_second,
            "loader_wait": loader_wait,
            **{
                f"epochs/{name}": epochs(source, self.progress.cursors.get(name, {}), self._shards(name))
                for name, source in self.sources.items()
            },
            "eta_seconds": lap.seconds_per_step * (self.total_steps - step - 1),
        }
        if self.peak_flops is not None:
            observed["mfu"] = lap.flops_per_second / self.peak_flops
        if self.world.device.type == "cuda":
            observed["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.metrics.log_train(step + 1, observed)
        if self.sample_freq and ((step + 1) % self.sample_freq == 0 or step == 0):
            self._log_sample(step, totals)

    def _log_sample(self, step: int, totals: dict[str, Tensor]) -> None:
        """The step's last row as segments, and the load of the experts, where the model has them."""
        assert self.metrics is not None and self.last_rows is not None
        ids, boundaries = self.last_rows
        text = segmented_text(ids[-1].tolist(), boundaries[-1].tolist()) if boundaries is not None else None
        load = totals.get("expert_load")
        self.metrics.log_sample(step + 1, text, expert_map(load.cpu().numpy()) if load is not None else None)

    def _log_phase_switch(self, step: int) -> None:
        index = self.curriculum.index_at(step)
        if step == 0 or index != self.curriculum.index_at(step - 1):
            logger.info("phase %s", startup.describe_phase(self.curriculum, index))

    def _finish(self, seconds: float) -> None:
        if self.checkpoints:
            self.checkpoints.close()
        validation, num_bytes = self.last_validation.get("validation_bpb"), self.progress.bytes_seen - self.bytes_before
        logger.info(
            "done: %d steps, %s bytes in %s (%s with validation)%s",
            self.progress.step,
            f"{num_bytes:,}",
            format_duration(seconds),
            format_byte_rate(num_bytes / seconds).strip(),
            f", held-out bpb {validation:.4f}" if validation is not None else "",
        )
        self._close()

    def _close(self) -> None:
        if self.metrics:
            self.metrics.close()
        if self.run_directory:
            logger.info("run directory %s", self.run_directory.path)
            self.run_directory.close()

    def _build_data(self, config: JobConfig, sources: Mapping[str, TrainingSource]) -> tuple[int, TrainLoader]:
        """Micro-batches a step, and the endless batches of this rank."""
        rows_per_step = self.training.rows_per_step(self.world.size)
        loader = build_train_loader(
            config.data,
            sources,
            self.curriculum,
            seq_len=self.training.seq_len,
            batch_size=self.training.local_batch_size,
            num_rows=rows_per_step,
            seed=self.training.seed,
            rank=self.world.rank,
            world_size=self.world.size,
            first_step=self.progress.step,
            cursors=self.progress.cursors,
        )
        return rows_per_step // self.world.size // self.training.local_batch_size, loader

    def _build_validator(self, config: JobConfig, sources: Mapping[str, TrainingSource]) -> Validator | None:
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
        return Validator(self.spec, batches, self.world, config.validation.num_loops)

    def _warm_up(self, config: JobConfig) -> None:
        ids = torch.zeros(self.training.local_batch_size, self.training.seq_len, dtype=torch.int64)
        plan = WarmUp(
            config.data.phases,
            Batch(ids, ids).to(self.world.device),
            config.validation.enable,
            num_loops=self.spec.max_loops(self.model_config) if self.spec.max_loops else None,
        )
        warm_up(self.model, self.spec, plan)

    def _open_directory(self, config: JobConfig, config_text: str) -> RunDirectory | None:
        """The run directory; only the reporting rank has it."""
        if not self.world.is_reporter:
            return None
        directory = RunDirectory(config.job.dump_folder, goes_on=config.checkpoint.enable, config_text=config_text)
        directory.write_config(config_text)
        add_log_file(directory.log_file)
        return directory

    def _open_checkpoints(self, config: JobConfig, config_text: str) -> CheckpointManager | None:
        if not config.checkpoint.enable:
            return None
        root = checkpoint_folder(folder_of(config.job.dump_folder))
        return CheckpointManager(root, config.checkpoint, self.world, config_text)

    def _find_progress(self) -> tuple[Progress, int | None]:
        """How far the run is, and the step of the checkpoint that says so, if there is one."""
        num_rows = self.training.rows_per_step(self.world.size)
        interleave = {name: source.settings.interleave for name, source in self.sources.items()}
        step = self.checkpoints.find() if self.checkpoints else None
        if self.checkpoints is None or step is None:
            return Progress(num_rows, interleave), None
        progress = read_progress(self.checkpoints, step, num_rows, interleave)
        self.best_value, self.bytes_before = self.checkpoints.best_value(), progress.bytes_seen
        return progress, step

    def _restore(self, config: JobConfig, saved_step: int | None) -> None:
        """Fills model and optimizer from the checkpoint that was found, or the weights from one that is named."""
        if self.checkpoints is None:
            return
        if saved_step is not None:
            restore(self.checkpoints, saved_step, self.model, self.optimizer, self.world)
            self.checkpoints.go_on_from(saved_step)
            logger.info("checkpoint: going on after step %d of %d", saved_step, self.total_steps)
        elif config.checkpoint.initial_load_path:
            path = Path(config.checkpoint.initial_load_path).expanduser().resolve()
            load_weights(self.checkpoints, path, self.model)
            logger.info("checkpoint: initial weights from %s", path)
        plugins.after_step(self.model, self.plugin_context)

    def _open_metrics(self, config: JobConfig, config_text: str) -> MetricsLogger | None:
        if self.run_directory is None:
            return None
        wandb = WeightsAndBiases(self.run_directory.path, config_text) if config.metrics.enable_wandb else None
        return MetricsLogger(
            self.run_directory.metrics_file,
            total_steps=self.total_steps,
            tensorboard_folder=self.run_directory.tensorboard_folder if config.metrics.enable_tensorboard else None,
            first_step=self.progress.step,
            wandb=wandb,
        )

    def _build_profiler(self, config: JobConfig) -> Profiler | None:
        if not config.profiling.enabled:
            return None
        folder = folder_of(config.job.dump_folder)
        return Profiler(config.profiling, folder, rank=self.world.rank, device=self.world.device)

    def _build_model(self, config: JobConfig) -> nn.Module:
        """Meta device -> plugins -> memory -> initial weights, which are the same at every world size."""
        model = self.spec.build(config.model_config, device="meta")
        model = plugins.apply_plugins(model, self.spec, self.plugin_context)
        plugins.materialize(model, self.plugin_context, self.world.device)
        self.spec.init_weights(model, self.training.seed)
        return model.train()
