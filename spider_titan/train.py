"""The command: reads the configuration, builds the trainer, runs it.

Exit status: 0 done, 2 the user's mistake, 1 anything else.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NoReturn

from spider_titan import dry_run
from spider_titan.config import load_config, num_ranks, to_toml
from spider_titan.console import FATAL, setup_console
from spider_titan.data.problems import SourceError
from spider_titan.distributed import imagine_world, join_world
from spider_titan.failure import DONE, SIGNALLED, USER_MISTAKE, Failure, announce, explain, is_launched, save_failure
from spider_titan.interrupt import RESUMABLE, Stopped, StopRequest
from spider_titan.run_directory import DiskError
from spider_titan.trainer import Trainer
from spider_titan.watch import NonFiniteError

# Run as a program this module is called "__main__", which is outside the package's logger.
logger = logging.getLogger("spider_titan.train")


class UserMistake(Exception):
    """What the user can mend; the message says how."""


def main(arguments: Sequence[str]) -> int:
    """Runs a training, or describes it with ``job.dry_run``, and returns the exit status.

    What a user can cause ends with one line, anything else with a traceback. If a launcher has started this rank, it
    prints them, as it alone knows which rank was the first to fail; the log file has what rank 0 saw.
    """
    rank = int(os.environ.get("RANK", "0"))
    setup_console(rank=rank)
    try:
        _run(arguments)
    except Stopped as stopped:
        logger.info("%s", stopped)
        return RESUMABLE
    except KeyboardInterrupt:
        logger.error("interrupted", extra=FATAL)
        return SIGNALLED + signal.SIGINT
    except UserMistake as error:
        return _end(Failure(rank, str(error), "mistake", USER_MISTAKE))
    except (DiskError, UnreadableError, NonFiniteError) as error:
        return _end(Failure(rank, str(error), "mistake"))
    except Exception as error:
        if not is_launched():
            raise
        return _end(explain(error, rank))
    return DONE


def _run(arguments: Sequence[str]) -> None:
    with _mistakes():
        config = load_config(arguments)
    if config.job.dry_run:
        with imagine_world(config.parallelism, num_ranks(config)) as world, _mistakes():
            dry_run.run(config, world)
        return
    # Without a place to save, a signal ends the run as it ends any program.
    listening = StopRequest(config.job.time_limit) if config.checkpoint.enable else nullcontext()
    with listening as stop_request, join_world(config.parallelism, config.comm) as world:
        with _mistakes():
            trainer = Trainer(config, to_toml(config), world, stop_request)
        try:
            trainer.train()
        except SourceError as error:
            raise UnreadableError(str(error)) from error


class UnreadableError(Exception):
    """Data that could be opened and cannot be read any more."""


@contextmanager
def _mistakes() -> Iterator[None]:
    """ValueErrors of the block are the user's mistakes; elsewhere they are bugs."""
    try:
        yield
    except ValueError as error:
        raise UserMistake(str(error)) from error


def _end(failure: Failure) -> int:
    logger.error("%s", failure.traceback or failure.text, extra=FATAL)
    if is_launched():
        save_failure(failure)
        if failure.kind != "lost contact":
            announce(failure)
    return failure.status


def _leave(status: int) -> NoReturn:
    """Ends the process with ``status``, without the interpreter's finalisation.

    In the finalisation a thread of native code that asks for the interpreter aborts the process, and its status with
    it, after everything was done and saved.
    """
    if status == DONE or not is_launched():
        atexit._run_exitfuncs()
    else:
        # The registered functions wait for threads of communication that is broken.
        logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _leave(main(sys.argv[1:]))
