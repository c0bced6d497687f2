"""Saving and loading the state of a run, by all ranks together."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse, async_save, save

from spider_titan.checkpoint import folders, tensors
from spider_titan.checkpoint.config import CheckpointConfig
from spider_titan.checkpoint.folders import DamagedError, FileRecord
from spider_titan.distributed import World
from spider_titan.run_directory import DiskError

logger = logging.getLogger(__name__)

STATE, CONFIG = "state.json", "config.toml"


@dataclass
class Snapshot:
    """What is saved at a step.

    Args:
        step: Optimizer steps done.
        tensors: Name -> tensor, see ``tensors``; the live ones.
        numbers: JSON values of this rank: what it alone knows.
        shared: JSON values that are the same on all ranks.
    """

    step: int
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]
    shared: dict[str, Any]


class CheckpointManager:
    """Writes and reads ``checkpoint/`` of a run directory; every method is called by all ranks at once.

    Args:
        root: The folder of checkpoints.
        config: The section ``[checkpoint]``.
        world: The ranks.
        config_text: The effective configuration, kept with every checkpoint.
    """

    def __init__(self, root: Path, config: CheckpointConfig, world: World, config_text: str) -> None:
        self.root, self.config, self._world, self._config_text = root, config, world, config_text
        # Of its own, since a save in the background communicates while training does; and without training's time
        # limit, since disks may be slow.
        self._group = dist.new_group(backend="gloo")
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self._pending_step = -1
        self._stager = _stager(config.async_mode)
        self._on_reporter("prepare the folder of checkpoints", self._prepare)

    def save(self, snapshot: Snapshot, *, kept_as: dict[str, dict[str, Any]] | None = None) -> None:
        """Saves; in an async mode returns as soon as the tensors may change again.

        Args:
            snapshot: The state.
            kept_as: Entries for ``kept.json``, which protect this step from being deleted.

        Raises:
            DiskError: On all ranks, if any could not write this checkpoint, or the one before in the background.
        """
        self.wait()
        staging = folders.staging_folder(self.root, snapshot.step)
        needed = tensors.nbytes(snapshot.tensors.values())
        self._on_reporter("write", lambda: self._make_room(staging, needed))
        states = self._gather(snapshot.numbers)
        text = json.dumps({"ranks": states, **snapshot.shared})

        def finish() -> None:
            self._finish(snapshot.step, staging, text, kept_as or {})

        if self.config.async_mode == "disabled":
            self._explained(staging, needed, lambda: self._write(snapshot.tensors, staging))
            self._explained(staging, needed, finish)
            return
        upload = self._start_upload(snapshot.tensors, staging)

        def in_background() -> None:
            self._explained(staging, needed, upload.result)
            self._explained(staging, needed, finish)

        self._pending, self._pending_step = self._executor.submit(in_background), snapshot.step

    def wait(self) -> None:
        """Returns when no save is under way.

        Raises:
            DiskError: If it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Waits, and ends the threads and processes that saves need."""
        self.wait()
        self._executor.shutdown()
        if self._stager is not None:
            self._stager.close()

    def find(self) -> int | None:
        """The step to go on from: that of the configuration, or the newest complete one; None if there is none.

        Each one that is passed over is named with the reason.

        Raises:
            ValueError: If the step asked for is not there or damaged, or there are folders but all are damaged.
        """
        steps = self._from_reporter(lambda: folders.steps_in(self.root))
        if self.config.load_step >= 0:
            known = ", ".join(f"step-{step}" for step in steps)
            steps = [step for step in steps if step == self.config.load_step]
            if not steps:
                raise ValueError(
                    f"checkpoint.load_step = {self.config.load_step}: {self.root} has "
                    f"{known or 'no checkpoint'}; give one of these steps, or -1 for the newest"
                )
        for step in steps:
            reason = self._damage(self.folder(step))
            if not reason:
                return step
            if self.config.load_step >= 0:
                raise ValueError(
                    f"checkpoint.load_step = {step}: {self.folder(step)} is damaged: {reason}; "
                    "give another step, or -1 for the newest complete one"
                )
            if self._world.is_reporter:
                logger.warning("checkpoint: passed over %s: %s", self.folder(step), reason)
        if steps:
            raise ValueError(
                f"no checkpoint in {self.root} is complete: {len(steps)} passed over, reasons above; repair one, or "
                "name another job.dump_folder to start anew"
            )
        return None

    def folder(self, step: int) -> Path:
        """Where the checkpoint of a step lies."""
        return folders.step_folder(self.root, step)

    def read_state(self, step: int) -> dict[str, Any]:
        """The JSON values of a checkpoint: ``ranks`` lists the numbers of each, the rest is shared."""
        return dict(json.loads((self.folder(step) / STATE).read_text(encoding="utf-8")))

    def require_complete(self, folder: Path) -> None:
        """Raises ValueError unless ``folder`` is a complete checkpoint."""
        if reason := self._damage(folder):
            raise ValueError(f"checkpoint.initial_load_path = {folder} is no complete checkpoint: {reason}")

    def load_tensors(self, folder: Path, wanted: dict[str, Tensor], *, prefix: str = "") -> None:
        """Reads a folder's tensors into ``wanted``, in place.

        Args:
            folder: A complete checkpoint.
            wanted: Name -> tensor.
            prefix: Only stored names with this prefix must be wanted.

        Raises:
            ValueError: Lists what differs, if names or shapes do.
        """
        stored = {name: value for name, value in tensors.read_metadata(folder).items() if name.startswith(prefix)}
        if differences := tensors.describe_differences(wanted, stored):
            raise ValueError(
                f"{folder} is of another model than the configured one:\n{differences}\n"
                "use the configuration that lies in it, or name another job.dump_folder"
            )
        tensors.load(folder, wanted, self._group)

    def go_on_from(self, step: int) -> None:
        """Sets aside what is newer than ``step``."""
        self._on_reporter("set aside newer checkpoints", lambda: folders.set_aside_newer(self.root, step))

    def best_value(self) -> float:
        """The value of the best checkpoint so far; infinite if there is none."""
        kept = self._from_reporter(lambda: folders.read_kept(self.root))
        return float(kept["best"]["value"]) if "best" in kept else float("inf")

    def has(self, step: int) -> bool:
        """Whether a step is saved, or is being saved."""
        return self._pending_step == step or self._from_reporter(lambda: (self.folder(step) / folders.MARKER).is_file())

    def _prepare(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        folders.remove_partial(self.root)

    def _make_room(self, staging: Path, needed: int) -> None:
        free = shutil.disk_usage(self.root).free
        if free < needed:
            raise OSError(f"{needed:,} bytes are needed and {free:,} are free")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()

    def _write(self, values: dict[str, Tensor], staging: Path) -> None:
        save(values, storage_writer=FileSystemWriter(staging), process_group=self._group)

    def _start_upload(self, values: dict[str, Tensor], staging: Path) -> Future[Any]:
        pinned = self.config.async_mode == "async_with_pinned_mem"
        response = async_save(
            values,
            storage_writer=FileSystemWriter(staging),
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if pinned else AsyncCheckpointerType.THREAD,
            async_stager=self._stager,
        )
        if isinstance(response, AsyncSaveResponse):
            response.staging_completion.result()
            return response.upload_completion
        return response

    def _finish(self, step: int, staging: Path, state: str, kept_as: dict[str, dict[str, Any]]) -> None:
        """Checksums by the ranks that wrote the files, then the marker and the new name."""
        records: dict[str, FileRecord] = {}
        mine = sorted(staging.glob(f"__{self._world.rank}_*"))
        if self._world.is_reporter:
            for name, text in ((STATE, state), (CONFIG, self._config_text)):
                (staging / name).write_text(text, encoding="utf-8")
                mine.append(staging / name)
            mine.append(staging / ".metadata")
        for path in mine:
            records[path.name] = folders.record_of(path)
        everyone = self._gather(records)
        if self._world.is_reporter:
            merged = {name: record for part in everyone for name, record in part.items()}
            folders.write_marker(staging, step, self._world.size, merged)
            folders.publish(staging, self.folder(step))
            self._note(step, kept_as)
            folders.retain(self.root, self.config.keep_latest_k, step)
            logger.info("checkpoint: %s", self.folder(step))

    def _note(self, step: int, kept_as: dict[str, dict[str, Any]]) -> None:
        if kept_as:
            entries = {name: {"step": step, **values} for name, values in kept_as.items()}
            folders.write_json(self.root / folders.KEPT, {**folders.read_kept(self.root), **entries})

    def _damage(self, folder: Path) -> str:
        """Why a checkpoint cannot be used, or nothing; ranks share the reading of its files."""
        reason = ""
        try:
            folders.verify(folder, folders.read_marker(folder), self._world.rank, self._world.size)
        except DamagedError as error:
            reason = str(error)
        return self._first_reason(reason)

    def _explained(self, staging: Path, needed: int, action: Callable[[], Any]) -> None:
        """Runs ``action`` on all ranks; if it fails on any, all raise the same error."""
        error = ""
        try:
            action()
        except (Exception, CheckpointException) as failure:  # The library's own is no Exception.
            # Whatever it is, the other ranks must hear of it before this one ends.
            error = _reason(failure)
            logger.debug("saving failed", exc_info=True)
        if reason := self._first_reason(error):
            raise DiskError(
                f"cannot write the checkpoint {staging} of {needed:,} bytes: {reason}; free some space, or lower "
                "checkpoint.keep_latest_k; earlier checkpoints are intact"
            )

    def _on_reporter(self, what: str, action: Callable[[], None]) -> None:
        """Runs ``action`` on rank 0; if it fails there, all raise."""

        def attempt() -> str:
            try:
                action()
            except OSError as error:
                return error.strerror or str(error)
            return ""

        if reason := self._from_reporter(attempt):
            raise DiskError(f"cannot {what} in {self.root}: {reason}")

    def _from_reporter(self, action: Callable[[], Any]) -> Any:
        """What ``action`` returns on rank 0."""
        values = [action() if self._world.is_reporter else None]
        dist.broadcast_object_list(values, group=self._group)
        return values[0]

    def _first_reason(self, reason: str) -> str:
        """That of the first rank that has one; empty if none has."""
        return next(filter(None, self._gather(reason)), "")

    def _gather(self, value: Any) -> list[Any]:
        """The values of all ranks."""
        values: list[Any] = [None] * self._world.size
        dist.all_gather_object(values, value, group=self._group)
        return values


def _stager(mode: str) -> Any:
    if mode != "async_with_pinned_mem":
        return None
    if not torch.accelerator.is_available():
        raise ValueError(
            'checkpoint.async_mode = "async_with_pinned_mem" needs an accelerator, and there is none; use "async"'
        )
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return DefaultStager(StagingOptions())


def _reason(error: BaseException) -> str:
    """The innermost cause: what the operating system said, if it did."""
    failures = getattr(error, "failures", None)  # Of the library's CheckpointException: rank -> (error, trace).
    if failures:
        error = next(iter(failures.values()))[0]
    while not isinstance(error, OSError) and (error.__cause__ or error.__context__):
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
