"""Ctrl-C and SIGTERM: the first asks for a stop at the next update, the second stops now."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StoppedNow(BaseException):
    """The second signal: nothing more is written, and everything saved stays as it is."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


class StopRequests:
    """Inside `with`, signals are requests; outside the main thread Python delivers none and this does nothing."""

    def __init__(self, notice: Callable[[str], None]) -> None:
        self.requested = False
        self.notice = notice
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self.handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            raise StoppedNow(signum)
        self.requested = True
        self.notice(
            f"{signal.Signals(signum).name}: stopping after this update with a checkpoint; once more stops now."
        )
