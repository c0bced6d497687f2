"""The run directory (``job.dump_folder``), where everything that a run leaves behind lies.

    config.toml       the effective configuration, reloadable
    logs/train.log    what the console showed; a full file becomes train.log.1
    metrics.jsonl     one object a logged step
    tb/               TensorBoard events
    checkpoint/       saved states, if the run saves

One run at a time owns it. A run that saves goes on where the one in the folder has come to. Any other run that is found
in it is kept: its folder is renamed to the first free one of ``FOLDER.1``, ``FOLDER.2`` and so on.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from spider_titan.checkpoint.folders import steps_in

logger = logging.getLogger(__name__)


class DiskError(OSError):
    """A file of the run could not be written; the message names it, the reason and the remedy."""


@contextmanager
def explain_disk_errors(path: Path | str) -> Iterator[None]:
    """Turns an OSError of the block, which writes ``path``, into a ``DiskError``."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"cannot write {path}: {error.strerror or error}; free some space, or set job.dump_folder to another disk"
        ) from error


def folder_of(path: Path | str) -> Path:
    """The folder that ``job.dump_folder`` names; relative paths start at the current folder."""
    return Path(path).expanduser().resolve()


def checkpoint_folder(folder: Path) -> Path:
    """Where the run of a folder saves its states."""
    return folder / "checkpoint"


class RunDirectory:
    """Creates the directory, keeps an earlier run that lies in it, and holds it against a second run until ``close``.

    Args:
        path: The value of ``job.dump_folder``; relative paths start at the current folder.
        goes_on: Whether an earlier run that is found there may be the one that this run goes on with. It is if it has
            saved a state, or has the same configuration.
        config_text: The effective configuration.

    Raises:
        ValueError: If the folder cannot be created or written, or another run is using it.
    """

    def __init__(self, path: Path | str, *, goes_on: bool = False, config_text: str = "") -> None:
        self.path = folder_of(path)
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"job.dump_folder: {self.path} is a file; name a folder")
        try:
            if (self.config_file.exists() or self.metrics_file.exists()) and not (
                goes_on and self._is_same_run(config_text)
            ):
                self._move_aside()
            self.log_file.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _acquire_lock(self.path)
        except OSError as error:
            raise ValueError(
                f"job.dump_folder: cannot write in {self.path} ({error.strerror or error}); name a folder where you may"
            ) from error

    @property
    def config_file(self) -> Path:
        """The effective configuration."""
        return self.path / "config.toml"

    @property
    def log_file(self) -> Path:
        """The console's lines."""
        return self.path / "logs" / "train.log"

    @property
    def metrics_file(self) -> Path:
        """One JSON object a logged step."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard_folder(self) -> Path:
        """TensorBoard's event files; created by whoever writes them."""
        return self.path / "tb"

    @property
    def checkpoint_folder(self) -> Path:
        """Saved states."""
        return checkpoint_folder(self.path)

    def write_config(self, text: str) -> None:
        """Writes the effective configuration.

        Raises:
            DiskError: If it cannot be written.
        """
        with explain_disk_errors(self.config_file):
            self.config_file.write_text(text, encoding="utf-8")

    def close(self) -> None:
        """Lets another run use the folder; the end of the process does the same."""
        self._lock.close()

    def _is_same_run(self, config_text: str) -> bool:
        if steps_in(self.checkpoint_folder):
            return True
        return self.config_file.exists() and self.config_file.read_text(encoding="utf-8") == config_text

    def _move_aside(self) -> None:
        if Path.cwd().is_relative_to(self.path):
            raise ValueError(
                f"job.dump_folder: {self.path} holds an earlier run, which cannot be moved aside while the current "
                "folder is in it; name another folder"
            )
        siblings = (self.path.with_name(f"{self.path.name}.{number}") for number in itertools.count(1))
        target = next(sibling for sibling in siblings if not sibling.exists())
        with _acquire_lock(self.path):
            self.path.rename(target)
        logger.info("%s held an earlier run; it is kept as %s", self.path, target)


_held: weakref.WeakSet[IO[str]] = weakref.WeakSet()
"""Lock files that this process has open. A lock belongs to the open file, so a child of a fork would hold it too, and
go on holding it when this process is killed."""


def _close_in_child() -> None:
    for lock_file in list(_held):
        lock_file.close()


os.register_at_fork(after_in_child=_close_in_child)


def _acquire_lock(folder: Path) -> IO[str]:
    """Locks ``folder`` for as long as the returned file is open.

    Raises:
        ValueError: If another run holds it.
    """
    lock_file = (folder / ".lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock_file.close()
        raise ValueError(
            f"job.dump_folder: another run is using {folder}; wait for its end, or name another folder"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            lock_file.close()
            raise
        logger.warning("the file system of %s has no locks: do not start a second run in that folder", folder)
    _held.add(lock_file)
    return lock_file
