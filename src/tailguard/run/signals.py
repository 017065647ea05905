"""Ctrl-C, SIGTERM, a closed terminal (SIGHUP): the first asks for a stop at the next update, the second stops now."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONE_HANGUP_S = 2.0
"""A terminal that closes sends SIGHUP twice (its shell, then the system), a service manager SIGTERM and SIGHUP: signals
so close to each other, of which one is SIGHUP, are one request."""


class StoppedNow(BaseException):
    """Work that a signal ended before its end: everything saved stays as it is."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


class StopSignals:
    """Inside `with`, remembers the first stop signal and calls `first`; a further one calls `again`.

    SIGHUP stays ignored where it was, as nohup asks for. Outside the main thread Python delivers no signals and this
    does nothing.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.at = 0.0
        self.before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.signum is not None

    def first(self, signum: int) -> None:
        """Say that the request was heard."""

    def again(self, signum: int) -> None:
        raise StoppedNow(signum)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handled = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
            self.before = {number: signal.signal(number, self.handle) for number in handled}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signum is not None:
            if signal.SIGHUP not in (signum, self.signum) or now - self.at > ONE_HANGUP_S:
                self.again(signum)
            return
        self.signum, self.at = signum, now
        with suppress(OSError, RuntimeError):  # the terminal has gone, or a line was just being written to it
            self.first(signum)


class StopRequests(StopSignals):
    """Stop requests of one training: it ends after its update, with a checkpoint."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        super().__init__()
        self.notice = notice

    def first(self, signum: int) -> None:
        self.notice(
            f"{signal.Signals(signum).name}: stopping after this update with a checkpoint; once more stops now."
        )
