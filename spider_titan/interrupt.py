"""Signals and the time limit: wishes to stop, which the trainer asks for at its own moments.

The first SIGTERM or SIGINT is a wish: the step under way is finished, the state is saved, and the run ends with exit
status 75. A second one ends the process at once.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

RESUMABLE = 75
"""Exit status of a run that was stopped with its state saved: the same command goes on."""


DEBOUNCE_SECONDS = 2.0
"""Launchers and terminals send a signal to all of a job's processes and pass it on too: so soon it is the same wish."""


class Stopped(Exception):
    """The run was asked to stop, and its state is saved."""


class WaitInterrupted(Exception):
    """A signal came while the run waited for something that may never come."""


class StopRequest:
    """A context manager that listens to signals and looks at the clock.

    Args:
        time_limit: Seconds from now after which to stop; None: never.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, time_limit: float | None = None) -> None:
        self._deadline = None if time_limit is None else time.monotonic() + time_limit
        self._signal: signal.Signals | None = None
        self._received = 0.0
        self._interrupts = False
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def reason(self) -> str:
        """Why to stop; empty as long as there is no reason."""
        if self._signal is not None:
            return f"received {self._signal.name}"
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "job.time_limit is reached"
        return ""

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Within the block a signal raises ``WaitInterrupted``; what was waited for must not be asked again."""
        self._interrupts = True
        try:
            if self._signal is not None:
                raise WaitInterrupted
            yield
        finally:
            self._interrupts = False

    def __enter__(self) -> StopRequest:
        for number in self.SIGNALS:
            self._previous[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._signal is not None and now - self._received < DEBOUNCE_SECONDS:
            return
        if self._signal is not None:
            # Now means now: no handler, no exit hook.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._signal, self._received = signal.Signals(number), now
        # No lock may be waited for in a handler: the log's could be held by the code that was interrupted.
        os.write(2, f"{self._signal.name}: stopping after this step; once more stops at once\n".encode())
        if self._interrupts:
            raise WaitInterrupted
