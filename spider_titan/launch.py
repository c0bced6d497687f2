"""Starts ``spider_titan.train`` on every rank of this node, ends them all when one fails, and says which one was first.

    python -m spider_titan.launch --nproc-per-node 2 [--nnodes ... ] -- [arguments of spider_titan.train]

The agent of torchrun does the work: it meets those of the other nodes, starts ranks with the environment variables that
``torch.distributed`` reads, and starts all again after a failure if restarts are left.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from spider_titan.console import setup_console
from spider_titan.failure import DONE, FAILED, SIGNALLED, Failure, read_failure
from spider_titan.interrupt import RESUMABLE

# Run as a program this module is called "__main__", which is outside the package's logger.
logger = logging.getLogger("spider_titan.launch")

MEET_SECONDS = 900
"""How long nodes wait for each other."""

GRACE_SECONDS = 3.0
"""How long the other ranks have to end by themselves, and to say why, once one has failed."""


def main(arguments: Sequence[str]) -> int:
    """Runs all ranks of this node to their end.

    Returns:
        Exit status: 0; 75 if the run was asked to stop and is saved; that of the failure that came first in the last
        attempt; 128 + signal if a signal ended it.
    """
    setup_console()
    options = _read(arguments)
    # What a single process would use, shared out.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, torch.get_num_threads() // options.nproc_per_node)))
    # They report processes that fail, and signals, which is told here in other words.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="spider_titan_", ignore_cleanup_errors=True) as folder:
        try:
            spec = _worker_spec(options)
            agent = Agent(spec, folder)
            result = agent.run()
            spec.rdzv_handler.shutdown()
        except SignalException as error:
            # The agent has passed it on, and waited for ranks that save what they have.
            if agent.stopped():
                return RESUMABLE
            logger.error("stopped by signal %d (%s)", error.sigval, error.sigval.name)
            return SIGNALLED + error.sigval
        except (RendezvousError, dist.DistError) as error:
            logger.error("%s", _explain_meeting(options, error))
            return FAILED
    if result.is_failed():
        return agent.failures[-1].status
    return RESUMABLE if agent.stopped() else DONE


class Agent(LocalElasticAgent):
    """torchrun's agent, which also names the first failure of each attempt.

    Args:
        spec: What to start, how often and with whom.
        folder: Where ranks leave their failures.
    """

    def __init__(self, spec: WorkerSpec, folder: str) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=folder))
        self.failures: list[Failure] = []
        """The first of each attempt that failed."""
        self._ended: dict[int, float] = {}

    def stopped(self) -> bool:
        """Whether all ranks have ended because the run was asked to stop, with its state saved."""
        assert isinstance(self._pcontext, SubprocessContext), "ranks are programs"
        return {handler.proc.poll() for handler in self._pcontext.subprocess_handlers.values()} == {RESUMABLE}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """The agent's look at its ranks; it ends them all as soon as it sees one that failed."""
        assert isinstance(self._pcontext, SubprocessContext), "ranks are programs"
        statuses = {rank: handler.proc.poll() for rank, handler in self._pcontext.subprocess_handlers.items()}
        if self.stopped():
            # To the agent that is no failure, after which it would start them again.
            return RunResult(state=WorkerState.SUCCEEDED)
        for rank, status in statuses.items():
            if status:
                self._ended.setdefault(rank, time.time())
        if self._ended and None in statuses.values() and time.time() < min(self._ended.values()) + GRACE_SECONDS:
            return RunResult(state=WorkerState.HEALTHY)
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            self._kill_descendants()
            self._report(result.failures)
            self._ended = {}
        return result

    def _kill_descendants(self) -> None:
        """Ends what failed ranks have left, such as loader processes, which hold the lock of the run directory."""
        assert self._pcontext is not None
        for pid in self._pcontext.pids().values():
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _report(self, ends: Mapping[int, ProcessFailure]) -> None:
        failures = sorted(filter(None, (self._failure(rank, end) for rank, end in ends.items())), key=_precedence)
        first = failures[0]
        self.failures.append(first)
        for failure in failures[1:]:
            if failure.kind != "lost contact" and failure.text != first.text:
                logger.error("also failed: %s", failure)
        if first.traceback:
            logger.error("rank %d raised\n%s", first.rank, first.traceback.rstrip())
        if first.kind == "mistake" and {failure.text for failure in failures} == {first.text}:
            logger.error("%s", first.text)
        else:
            logger.error("first failure: %s", first)
        attempts = self._worker_group.spec.max_restarts + 1
        if self._remaining_restarts:
            logger.warning(
                "starting all ranks again: attempt %d of %d", attempts - self._remaining_restarts + 1, attempts
            )

    def _failure(self, rank: int, end: ProcessFailure) -> Failure | None:
        """Why ``rank`` ended; None if the agent ended it."""
        failure = read_failure(end.error_file)
        if failure:
            return failure
        if end.local_rank not in self._ended and -end.exitcode in (signal.SIGTERM, signal.SIGKILL):
            return None
        when = self._ended.get(end.local_rank, time.time())
        if end.exitcode > 0:
            return Failure(rank, "ended without a word", "exception", end.exitcode, time=when)
        return Failure(rank, _describe_signal(-end.exitcode), "signal", SIGNALLED - end.exitcode, time=when)


def _precedence(failure: Failure) -> tuple[int, float]:
    """The first failure has the lowest: who was killed, then who failed, then who noticed; each by time.

    Ranks that communicate with one that was killed can be quicker to notice than the agent.
    """
    # A library that cannot go on aborts its process, also because another rank is gone.
    if failure.kind == "signal" and failure.status != SIGNALLED + signal.SIGABRT:
        return 0, failure.time
    return (2 if failure.kind == "lost contact" else 1), failure.time


def _describe_signal(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "a real-time signal"
    hint = "; the system does that when memory runs out" if number == signal.SIGKILL else ""
    return f"killed by signal {number} ({name}{hint})"


def _worker_spec(options: argparse.Namespace) -> WorkerSpec:
    if options.nnodes == 1:
        # The agent takes a port that is free.
        meeting = RendezvousParameters("c10d", "localhost:0", uuid.uuid4().hex, 1, 1, local_addr="localhost")
    else:
        endpoint = f"{options.master_addr}:{options.master_port}"
        nodes = options.nnodes
        meeting = RendezvousParameters(
            "static", endpoint, "spider_titan", nodes, nodes, rank=options.node_rank, timeout=MEET_SECONDS
        )
    return WorkerSpec(
        role="spider_titan",
        local_world_size=options.nproc_per_node,
        rdzv_handler=get_rendezvous_handler(meeting),
        entrypoint=sys.executable,
        args=("-u", "-m", "spider_titan.train", *options.arguments),
        max_restarts=options.max_restarts,
        monitor_interval=0.1,
        master_addr=options.master_addr if options.nnodes > 1 else None,
        master_port=options.master_port if options.nnodes > 1 else None,
    )


def _explain_meeting(options: argparse.Namespace, error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    if options.nnodes == 1:
        return f"cannot start the ranks: {reason}"
    return (
        f"cannot meet the other nodes at {options.master_addr}:{options.master_port}: {reason}; start {options.nnodes} "
        "nodes with the same MASTER_ADDR, the first one's address, and a MASTER_PORT that is free there"
    )


def _read(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m spider_titan.launch", allow_abbrev=False)
    parser.add_argument("--nproc-per-node", type=int, required=True, help="ranks on this node")
    parser.add_argument("--nnodes", type=int, default=1, help="nodes in all")
    parser.add_argument("--node-rank", type=int, default=0, help="this node's number, from 0")
    parser.add_argument("--master-addr", default="localhost", help="address of node 0")
    parser.add_argument("--master-port", type=int, default=29500, help="a free port of node 0")
    parser.add_argument("--max-restarts", type=int, default=0, help="how often all ranks start again after a failure")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="of spider_titan.train")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
