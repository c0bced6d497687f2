"""Why a rank ended: what it leaves for its launcher and for the other ranks, so that the first cause can be named.

A rank that fails writes a ``Failure`` into the file that the launcher gave it. If it could not go on because of another
rank, it first asks the store, which lives in the launcher of the first node, what the others know (``call_roll``).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

DONE, FAILED, USER_MISTAKE, SIGNALLED = 0, 1, 2, 128
"""Exit statuses; a process that a signal ended counts as ``SIGNALLED`` + signal."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""The environment variable in which torch's agent tells a rank where to leave its failure."""

ROLL_CALL_SECONDS = 5.0
"""How long ranks that lost contact wait for each other's report before those that are silent are named."""

CONTACT_ERRORS = ("gloo/transport/", "timeout caused pair closure")
"""Parts of the messages that gloo's errors, plain RuntimeErrors, have."""

T = TypeVar("T")

Kind = Literal["mistake", "exception", "signal", "lost contact"]


@dataclass(frozen=True)
class Failure:
    """Why a rank ended.

    Args:
        rank: The rank to blame, which another one may have reported.
        text: One line.
        kind: mistake: the user's; lost contact: a consequence of what happened on another rank.
        status: Exit status.
        traceback: Of the exception; empty if it would tell the user nothing.
        time: Seconds since the epoch.
    """

    rank: int
    text: str
    kind: Kind
    status: int = FAILED
    traceback: str = ""
    time: float = field(default_factory=time.time)

    def __str__(self) -> str:
        ending = "" if self.kind == "signal" else f" (exit status {self.status})"
        return f"rank {self.rank}, {self.text}{ending}"


def is_launched() -> bool:
    """Whether a launcher waits for this process and prints why it failed."""
    return bool(os.environ.get(ERROR_FILE))


def save_failure(failure: Failure) -> None:
    """Leaves ``failure`` where the launcher looks for it; torchrun itself understands the file too."""
    extra = {"py_callstack": failure.traceback or failure.text, "timestamp": str(int(failure.time))}
    record = {"message": {"message": failure.text, "extraInfo": extra}, "failure": asdict(failure)}
    Path(os.environ[ERROR_FILE]).write_text(json.dumps(record), encoding="utf-8")


def read_failure(path: Path | str) -> Failure | None:
    """The failure that a rank has left in ``path``; None if it did not come to that."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    # A process that is killed while it writes leaves a part.
    return Failure(**json.loads(text)["failure"]) if text.endswith("}") else None


def explain(error: Exception, rank: int) -> Failure:
    """What ``error``, raised on ``rank``, is put down to; asks the other ranks if the cause is with them."""
    if is_lost_contact(error):
        return _ask_others(error, rank)
    return Failure(rank, _one_line(error), "exception", traceback="".join(traceback.format_exception(error)))


def is_lost_contact(error: BaseException) -> bool:
    """Whether ``error`` says that communication with other ranks failed."""
    return isinstance(error, dist.DistError) or any(part in str(error) for part in CONTACT_ERRORS)


def announce(failure: Failure) -> None:
    """Tells the other ranks, if this process is in a group of several."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        _within(ROLL_CALL_SECONDS, lambda: _sign(_get_default_store(), failure.rank, failure.text))


@dataclass(frozen=True)
class RollCall:
    """What ranks that lost contact find out about the others.

    Args:
        cause: Rank and text of the first failure that was announced.
        silent: Ranks that neither failed nor noticed a failure.
    """

    cause: tuple[int, str] | None = None
    silent: tuple[int, ...] = ()


def call_roll(seconds: float = ROLL_CALL_SECONDS) -> RollCall | None:
    """Finds out which rank made communication fail; every rank that sees it fail calls this.

    It needs the store alone: connections between ranks are closed for good once a collective has timed out.

    Returns:
        None if the store does not answer either.
    """
    store, rank, size = _get_default_store(), dist.get_rank(), dist.get_world_size()
    return _within(2 * seconds, lambda: _call_roll(store, rank, size, seconds))


def _call_roll(store: Store, rank: int, size: int, seconds: float) -> RollCall:
    _sign(store, rank, "")
    deadline = time.monotonic() + seconds
    while True:
        if store.check(["cause"]):
            cause_rank, cause = json.loads(store.get("cause"))
            return RollCall(cause=(cause_rank, cause))
        # A sum is one request, however many ranks there are.
        if store.add("signatures", 0) == size:
            return RollCall()
        if time.monotonic() > deadline:
            return RollCall(silent=tuple(other for other in range(size) if not store.check([f"signature/{other}"])))
        time.sleep(0.1)


def _sign(store: Store, rank: int, failure: str) -> None:
    """Says that this rank is there, and its failure if it has one of its own; the first one counts."""
    if failure:
        store.compare_set("cause", "", json.dumps([rank, failure]))
    store.set(f"signature/{rank}", "")
    store.add("signatures", 1)


def _ask_others(error: Exception, rank: int) -> Failure:
    # The place in gloo's sources and its advice to look at other logs tell a user nothing.
    what = re.sub(r"^\[[^]]*gloo/transport/[^]]*\] ", "", str(error).partition("\n")[0]).partition(". ")[0]
    if not dist.is_initialized():
        return Failure(rank, f"could not join the other ranks: {what}", "lost contact")
    roll = call_roll()
    if roll is None:
        return Failure(rank, f"lost contact to the other ranks and to the node of rank 0: {what}", "lost contact")
    if roll.cause:
        return Failure(*roll.cause, "lost contact")
    if roll.silent:
        also = f", nor from {list(roll.silent[1:])}" if roll.silent[1:] else ""
        return Failure(roll.silent[0], f"no answer from it{also}; rank {rank} saw: {what}", "lost contact")
    return Failure(rank, f"lost contact though all ranks still answer: {what}", "lost contact")


def _within(seconds: float, call: Callable[[], T]) -> T | None:
    """What ``call`` returns; None if the store is gone, or does not answer in time, as on a dead machine."""
    results: list[T] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


def _one_line(error: Exception) -> str:
    first = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
