"""What a run says: plain lines with a time stamp, on the console and in ``logs/train.log``.

Every module logs through ``logging.getLogger(__name__)``, a child of the logger ``spider_titan`` that is set up here.
"""

from __future__ import annotations

import logging
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

from spider_titan.failure import is_launched
from spider_titan.run_directory import DiskError, explain_disk_errors

LOGGER_NAME = "spider_titan"

LOG_FILE_BYTES, OLD_LOG_FILES = 64 * 2**20, 20
"""About half a million lines a file, and files enough that no run of any use loses one."""

FATAL = {"is_fatal": True}
"""``extra`` of the line that says why a rank ends; if there is a launcher, it shows the one that matters."""


class _LineFormatter(logging.Formatter):
    """``time  [rank N]  [LEVEL]  message``; the level stands only on warnings and worse."""

    def __init__(self, rank: int) -> None:
        super().__init__("%(asctime)s  %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
        self._rank_part = f"rank {rank}  " if rank else ""

    def formatMessage(self, record: logging.LogRecord) -> str:
        level_part = f"{record.levelname}  " if record.levelno >= logging.WARNING else ""
        return f"{record.asctime}  {self._rank_part}{level_part}{record.message}"


def _is_for_console(record: logging.LogRecord) -> bool:
    return not (getattr(record, "is_fatal", False) and is_launched())


class _LogFile(RotatingFileHandler):
    """A log file that does not let a line get lost: a failed write ends the run instead of printing a traceback.

    A full file is renamed to ``train.log.1``, the one before to ``train.log.2``, and so on.
    """

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, DiskError):
            # Explained already: the base class calls again for what its own base class has let pass.
            raise error
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        # Whoever reports this error logs it, and must not fail at it again.
        logging.getLogger(LOGGER_NAME).removeHandler(self)
        with explain_disk_errors(self.baseFilename):
            raise error


def setup_console(*, rank: int = 0) -> None:
    """Sends log lines to standard output: everything from rank 0, only warnings, marked with the rank, from others.

    Calling it again starts over: log files that were added are closed.
    """
    logger = logging.getLogger(LOGGER_NAME)
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.INFO)
    console = logging.StreamHandler(sys.stdout)
    console.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    console.setFormatter(_LineFormatter(rank))
    console.addFilter(_is_for_console)
    logger.addHandler(console)


def add_log_file(path: Path, *, max_bytes: int = LOG_FILE_BYTES, max_old_files: int = OLD_LOG_FILES) -> None:
    """Also appends every line from now on to ``path``; for rank 0.

    Args:
        path: The file.
        max_bytes: Once a line would make it longer, the file is renamed and a new one begun.
        max_old_files: Renamed files that are kept.

    Raises:
        DiskError: If it cannot be opened; later from the logging call whose line cannot be written.
    """
    with explain_disk_errors(path):
        log_file = _LogFile(path, maxBytes=max_bytes, backupCount=max_old_files, encoding="utf-8")
    log_file.setFormatter(_LineFormatter(rank=0))
    logging.getLogger(LOGGER_NAME).addHandler(log_file)


def count(number: int, noun: str, plural: str = "s") -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else plural}"
