"""Threads of torch around a fork, and memory that is kept between updates."""

from __future__ import annotations

import ctypes
import os
import sys

KEPT_BYTES = 1 << 30  # below this, freed memory stays with the process
OMP_PAUSE_SOFT = 1
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8  # glibc's names for mallopt


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
