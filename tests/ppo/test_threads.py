"""Threads that call what they are given: results, errors, and their end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time

import pytest

from tailguard.ppo.threads import Threads

NAME = "tailguard-update"


def helpers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(NAME)]


def test_results_come_in_the_order_of_the_pieces_and_other_threads_have_a_part_in_them() -> None:
    threads = Threads(3, 6, None)
    together = threading.Barrier(3, timeout=10.0)

    def piece(i: int) -> tuple[int, str]:
        if i < 3:
            together.wait()  # returns only when three threads are here
        return i, threading.current_thread().name

    found = threads.run([lambda i=i: piece(i) for i in range(6)])  # type: ignore[misc]
    assert [i for i, _ in found] == list(range(6))
    assert len({name for _, name in found}) == 3


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_in_any_thread_reaches_the_caller_and_the_threads_go_on(broken: int) -> None:
    threads = Threads(2, 2, None)
    together = threading.Barrier(2, timeout=10.0)

    def piece(i: int) -> int:
        together.wait()
        time.sleep(0.05 * (i != broken))
        if i == broken:
            raise ValueError(f"piece {i}")
        return i

    with pytest.raises(ValueError, match=f"piece {broken}"):
        threads.run([lambda: piece(0), lambda: piece(1)])
    assert threads.run([lambda: 1, lambda: 2]) == [1, 2]


def test_an_error_is_raised_only_when_nobody_works_any_more() -> None:
    threads, ended = Threads(3, 3, None), []
    together = threading.Barrier(3, timeout=10.0)

    def piece(i: int) -> None:
        together.wait()
        if i == 0:
            raise ValueError("first")
        time.sleep(0.2)
        ended.append(i)

    with pytest.raises(ValueError, match="first"):
        threads.run([lambda i=i: piece(i) for i in range(3)])  # type: ignore[misc]
    assert sorted(ended) == [1, 2]


def test_what_was_begun_can_be_waited_for() -> None:
    threads, went_on = Threads(2, 2, None), threading.Event()
    wait = threads.begin(lambda: went_on.wait(10.0))
    went_on.set()
    assert wait() is True
    assert wait() is True
    alone = Threads(1, 2, None)
    assert alone.begin(lambda: 1 / 0)() is None  # nobody has time, so nobody calls it


def test_threads_end_with_whoever_owns_them() -> None:
    gc.collect()
    before = len(helpers())
    threads = Threads(3, 6, None)
    threads.run([lambda: None] * 6)
    assert len(helpers()) == before + 2
    del threads
    gc.collect()
    assert len(helpers()) == before


def test_a_process_with_waiting_threads_ends_cleanly() -> None:
    code = "from tailguard.ppo.threads import Threads; t = Threads(2, 2, 1); print(t.run([lambda: 1, lambda: 2]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1, 2]\n", "")


INTERRUPTED = """
import os, signal, time
from tailguard.ppo.threads import Threads

threads, ended = Threads(2, 2, None), []

def slow(before, after):
    time.sleep(before)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(after)
    ended.append(True)

for before, after in [(0.1, 0.3), *((1e-4 * i, 0.0) for i in range(100))]:
    ended.clear()
    try:
        wait = threads.begin(lambda: slow(before, after))
        wait()
        time.sleep(0.1)  # here the signal came late
    except KeyboardInterrupt:
        wait()
    assert ended == [True]
print("done")
"""


def test_an_interrupt_is_raised_when_the_other_thread_has_ended() -> None:
    """It writes into memory that the next batch uses. Also when the signal comes just as it ends."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
