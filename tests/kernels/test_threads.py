"""The kernels' threads: forks, several callers at once, and what an interpreter does meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tailguard import kernels
from tailguard.kernels.networks import gradients
from tests.kernels.test_networks import random_job

pytestmark = pytest.mark.skipif(kernels.native() is None, reason=kernels.status())


def jobs_of(seed: int) -> tuple[list[Any], Any]:
    """Two jobs of which every sequence is chosen."""
    rng = np.random.default_rng(seed)
    jobs = [random_job(rng, kind)[0] for kind in ("gaussian", "risk")]
    n = min(job.observations.shape[1] for job in jobs)
    return jobs, np.arange(n)


def digest(seed: int, n_threads: int) -> bytes:
    jobs, chosen = jobs_of(seed)
    gradients(jobs, chosen, n_threads)
    return b"".join(job.gradient.tobytes() for job in jobs)


def in_a_child(pipe: Any, seed: int) -> None:
    pipe.send(digest(seed, 3))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_a_process_whose_threads_run(method: str) -> None:
    wanted, context = digest(5, 3), multiprocessing.get_context(method)
    for _ in range(10 if method == "fork" else 1):
        ours, theirs = context.Pipe()
        child = context.Process(target=in_a_child, args=(theirs, 5))
        child.start()
        assert ours.poll(60), "the child hangs"
        assert ours.recv() == wanted
        child.join(60)
        assert child.exitcode == 0


def test_a_fork_while_other_threads_use_the_pool() -> None:
    stop, wanted = threading.Event(), digest(1, 2)

    def work() -> None:
        while not stop.is_set():
            assert digest(2, 2)

    with ThreadPoolExecutor(2) as pool:
        busy = [pool.submit(work) for _ in range(2)]
        try:
            for _ in range(10):
                child = os.fork()
                if child == 0:
                    signal.alarm(60)  # ends the child if it hangs
                    os._exit(0 if digest(1, 2) == wanted else 1)
                assert os.waitpid(child, 0)[1] == 0
        finally:
            stop.set()
        for done in busy:
            done.result(60)


def test_several_python_threads_at_once() -> None:
    wanted = [digest(seed, 1) for seed in range(6)]
    with ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            assert list(pool.map(lambda seed: digest(seed, 3), range(6))) == wanted


def test_an_interrupt_arrives_between_calls() -> None:
    """Pressed up to three times: where jobs are made anew in every call, a press in a few hundred is lost."""
    code = (
        "import os, signal, threading\n"
        "from tests.kernels.test_threads import digest\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell ignores it for background jobs
        "for seconds in (0.3, 3.0, 6.0):\n"
        "    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))\n"
        "    timer.daemon = True\n"
        "    timer.start()\n"
        "try:\n"
        "    while True: digest(3, 2)\n"
        "except KeyboardInterrupt: print('interrupted')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("interrupted\n", 0), done.stderr
