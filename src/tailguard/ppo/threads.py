"""Independent pieces of one update at the same time, and memory that is kept between updates."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from tailguard.loops import Crew, call_all, one_by_one

N_TRIALS = 8  # of each number of threads
KEPT_BYTES = 1 << 30  # below this, freed memory stays with the process
OMP_PAUSE_SOFT = 1
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # glibc's names for mallopt


class Threads(Crew):
    """Runs a few functions that share nothing; results do not depend on how many threads there are."""

    def __init__(self, n_threads: int | None, n_pieces: int, torch_threads: int | None) -> None:
        """`n_threads` None tries one thread and one per core (at most one per piece), and keeps the faster."""
        self.n_threads = min(n_threads or available_cores(), n_pieces)
        tried = () if n_threads is not None or self.n_threads == 1 else (1, self.n_threads)
        self.trials: dict[int, list[float]] = {count: [] for count in tried}  # seconds per unit of work
        self.torch_threads = torch_threads
        self.helpers: Helpers | None = None

    @property
    def count(self) -> int:
        """Threads that the next measured run takes: while they are compared, the numbers take turns."""
        return min(self.trials, key=lambda count: len(self.trials[count])) if self.trials else self.n_threads

    def run(self, pieces: Sequence[Callable[[], Any]]) -> list[Any]:
        """What each piece returns; every thread, the calling one too, takes the next piece until none is left."""
        return self.run_on(self.n_threads, pieces)

    def run_measured(self, pieces: Sequence[Callable[[], Any]], work: float) -> list[Any]:
        """The same for pieces that do so much work. After some runs of each number of threads, that of the fastest
        run, by its work, is kept."""
        count, began = self.count, time.perf_counter()
        results = self.run_on(count, pieces)
        if self.trials:
            self.trials[count].append((time.perf_counter() - began) / work)
            if all(len(seconds) == N_TRIALS for seconds in self.trials.values()):
                self.n_threads = min(self.trials, key=lambda count: min(self.trials[count]))
                self.trials = {}
        return results

    def run_on(self, n_threads: int, pieces: Sequence[Callable[[], Any]]) -> list[Any]:
        if n_threads == 1 or len(pieces) == 1:
            return one_by_one(pieces)
        results: list[Any] = [None] * len(pieces)
        waiting = iter(range(len(pieces)))  # asking a range's iterator for the next is one step of the interpreter

        def work() -> None:
            while (i := next(waiting, None)) is not None:
                results[i] = pieces[i]()

        others = [self.others.submit(work) for _ in range(min(n_threads, len(pieces)) - 1)]
        call_all([work, *others])  # nobody goes on while another still writes
        return results

    def begin(self, piece: Callable[[], Any]) -> Callable[[], Any]:
        return super().begin(piece) if self.n_threads == 1 else self.others.submit(piece)

    @property
    def others(self) -> Helpers:
        """All threads but the calling one; a process that was forked has none of them, and starts its own."""
        if self.helpers is None or self.helpers.pid != os.getpid():
            self.helpers = Helpers(self.n_threads - 1, self.torch_threads)
        return self.helpers


class Helpers:
    """Threads that wait for functions to call. An executor's futures and locks took a twentieth of a small batch."""

    def __init__(self, n_threads: int, torch_threads: int | None) -> None:
        self.pid = os.getpid()
        self.waiting: SimpleQueue[Job | None] = SimpleQueue()
        told = self.waiting, torch_threads
        threads = [
            threading.Thread(target=help_out, args=told, name=f"tailguard-update-{i}", daemon=True)
            for i in range(n_threads)
        ]
        for thread in threads:
            thread.start()
        weakref.finalize(self, dismiss, self.waiting, threads)  # also when the interpreter ends

    def submit(self, piece: Callable[[], Any]) -> Callable[[], Any]:
        """Have a function called; returns what waits for its end, and then gives its result or raises its error."""
        job = Job(piece)
        self.waiting.put(job)
        return job.wait


class Job:
    """A function that another thread calls once."""

    def __init__(self, piece: Callable[[], Any]) -> None:
        self.piece = piece
        self.outcome: list[tuple[Any, BaseException | None]] = []  # empty until it has ended
        self.ended = threading.Lock()
        self.ended.acquire()

    def call(self) -> None:
        try:
            self.outcome.append((self.piece(), None))
        except BaseException as error:  # it belongs to the one who waits
            self.outcome.append((None, error))
        self.ended.release()

    def wait(self) -> Any:
        """For its end, also when interrupted: it may still write, so nobody goes on before."""
        try:
            if not self.outcome:
                self.ended.acquire()
        except KeyboardInterrupt:  # before the lock was had, or just after
            while not self.outcome:
                time.sleep(1e-3)
            raise
        result, error = self.outcome[0]
        if error is not None:
            raise error
        return result


def help_out(waiting: SimpleQueue[Any], torch_threads: int | None) -> None:
    """Call what comes, until None does."""
    if torch_threads is not None:  # a new thread does not inherit the number of torch's threads
        torch.set_num_threads(torch_threads)
    while (job := waiting.get()) is not None:
        job.call()
        del job  # and what it holds, before the next one comes


def dismiss(waiting: SimpleQueue[Any], threads: list[threading.Thread]) -> None:
    for _ in threads:
        waiting.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def release_openmp_threads() -> None:
    """Have GNU OpenMP end the idle threads that torch's operations used; the next operation starts new ones.

    A fork copies none of them, and the child's first operation on several threads would wait for them for ever. The
    runtimes of other systems see to that themselves.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None) if sys.platform.startswith("linux") else None
    if pause is not None:
        pause(OMP_PAUSE_SOFT)


os.register_at_fork(before=release_openmp_threads)


def keep_freed_memory() -> None:
    """Ask glibc not to hand memory back to the system after every batch: asking for it again, page by page, was
    measured at a fifth of an update. Elsewhere this does nothing."""
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((MMAP_THRESHOLD, KEPT_BYTES), (TRIM_THRESHOLD, KEPT_BYTES), (ARENA_MAX, 1)):
            mallopt(option, value)
