"""Standard output and error that outlive their reader: a closed terminal or pipe must not cost a training."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

READER_GONE = (errno.EIO, errno.EPIPE, errno.ENXIO)
"""What writing to a closed terminal or pipe gives; other errors, such as a full disk, are raised."""


class LastingStream:
    """A text stream; once nobody reads it any more, what is written goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.attempt(lambda: self.stream.write(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        self.attempt(self.stream.flush)

    def attempt(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except OSError as error:
            if error.errno not in READER_GONE:
                raise
            # the descriptor leads nowhere from here on: what lies in buffers, and what others write to it, too
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Inside, `sys.stdout` and `sys.stderr` outlive whoever reads them."""
    before = sys.stdout, sys.stderr
    lasting = [None if stream is None else LastingStream(stream) for stream in before]
    sys.stdout, sys.stderr = lasting
    try:
        yield
    finally:
        for stream in lasting:
            if stream is not None:
                with suppress(ValueError):  # closed
                    stream.flush()
        sys.stdout, sys.stderr = before
