"""Independent pieces of one update at the same time, and memory that is kept between updates."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

KEPT_BYTES = 1 << 30  # below this, freed memory stays with the process
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # glibc's names for mallopt


class Threads:
    """Runs a few functions that share nothing; results do not depend on how many threads there are."""

    def __init__(self, n_threads: int | None, n_pieces: int, torch_threads: int | None) -> None:
        """`n_threads` None takes the machine's cores, but not more than there are pieces."""
        self.n_threads = min(n_threads or available_cores(), n_pieces)
        self.torch_threads = torch_threads
        self.pool: ThreadPoolExecutor | None = None

    def run(self, pieces: Sequence[Callable[[], Any]]) -> list[Any]:
        """What each piece returns; every thread, the calling one too, takes the next piece until none is left."""
        if self.n_threads == 1 or len(pieces) == 1:
            return [piece() for piece in pieces]
        if self.pool is None:
            self.pool = ThreadPoolExecutor(self.n_threads - 1, "tailguard-update", initializer=self.limit_torch)
        results: list[Any] = [None] * len(pieces)
        waiting = iter(range(len(pieces)))  # asking a range's iterator for the next is one step of the interpreter

        def work() -> None:
            while (i := next(waiting, None)) is not None:
                results[i] = pieces[i]()

        others = [self.pool.submit(work) for _ in range(min(self.n_threads, len(pieces)) - 1)]
        try:
            work()
        finally:
            for other in others:
                other.result()
        return results

    def limit_torch(self) -> None:
        """A new thread does not inherit the number of torch's threads."""
        if self.torch_threads is not None:
            torch.set_num_threads(self.torch_threads)


class Once:
    """Something that the first who asks for it does, and the others wait for."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.lock, self.done = work, threading.Lock(), False

    def __call__(self) -> None:
        with self.lock:
            if not self.done:
                self.work()
                self.done = True


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Ask glibc not to hand memory back to the system after every batch: asking for it again, page by page, was
    measured at a fifth of an update. Elsewhere this does nothing."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((MMAP_THRESHOLD, KEPT_BYTES), (TRIM_THRESHOLD, KEPT_BYTES), (ARENA_MAX, 1)):
            mallopt(option, value)
