"""J4, J5: workers and drivers are killed, stopped and frozen; the population is the one that nothing happened to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tailguard.population.driver import Population
from tailguard.population.journal import Journal
from tailguard.population.local import LocalExecutor
from tailguard.population.tasks import Task
from tests.faults.watching import children, n_lines, running, wait_until
from tests.population.tiny import digest_of, tiny_population

pytestmark = pytest.mark.slow
ROUNDS = 6


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest_of(tiny_population(ROUNDS), tmp_path_factory.mktemp("undisturbed"))


def segment_of(task: Task) -> str:
    return task.key.rpartition("/")[0]  # what is left is the attempt


def disturb(executor: LocalExecutor, folder: Path, which: signal.Signals, times: int, disturbed: list[int]) -> None:
    """Send a signal to a busy worker, `times` times, each after a little progress.

    A segment is spared after two of them: a member whose segment fails too often is rightly given up.
    """
    rng, hit = np.random.default_rng(0), Counter[str]()
    while len(disturbed) < times:
        seen = n_lines(folder)
        wait_until(lambda seen=seen: n_lines(folder) >= seen + 1 + len(disturbed) % 2)
        time.sleep(float(rng.uniform(0.0, 0.4)))
        at_work = [(worker.process.pid, worker.task) for worker in list(executor.workers)]
        busy = [(pid, segment_of(task)) for pid, task in at_work if task is not None]
        busy = [(pid, segment) for pid, segment in busy if hit[segment] < 2]
        if busy:
            pid, segment = busy[rng.integers(len(busy))]
            hit[segment] += 1
            disturbed.append(pid)
            os.kill(pid, which)


def disturbed_digest(folder: Path, which: signal.Signals, times: int, hang_timeout_s: float) -> tuple[str, int]:
    executor, disturbed = LocalExecutor(2, hang_timeout_s, folder / "logs"), list[int]()
    thread = threading.Thread(target=disturb, args=(executor, folder, which, times, disturbed), daemon=True)
    thread.start()
    digest = digest_of(tiny_population(ROUNDS), folder, executor)
    thread.join(10.0)
    return digest, len(disturbed)


def test_six_killed_workers_change_nothing(undisturbed: str, tmp_path: Path) -> None:
    digest, n_killed = disturbed_digest(tmp_path, signal.SIGKILL, 6, 600.0)
    assert n_killed == 6
    assert digest == undisturbed
    assert (
        sum(line["event"] == "failure" for line in Journal(tmp_path / "population.jsonl").read()) >= 5
    )  # one may have died just after it was done


def test_workers_that_hang_are_ended_and_their_segments_done_again(undisturbed: str, tmp_path: Path) -> None:
    digest, n_stopped = disturbed_digest(tmp_path, signal.SIGSTOP, 2, 30.0)
    assert n_stopped == 2
    assert digest == undisturbed
    reasons = [line["reason"] for line in Journal(tmp_path / "population.jsonl").read() if line["event"] == "failure"]
    assert any("no sign of life" in reason for reason in reasons)


def test_eight_killed_drivers_change_nothing_and_leave_no_orphans(undisturbed: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.population.drive", str(tmp_path)]
    rng = np.random.default_rng(1)
    n_killed = 0
    for _ in range(8):
        seen = n_lines(tmp_path)
        driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        # the first line of a restart says that it is one; then up to two events
        wait_until(
            lambda d=driver, s=seen: d.poll() is not None or n_lines(tmp_path) >= s + 1 + int(rng.integers(1, 3))
        )
        time.sleep(float(rng.uniform(0.0, 0.2)))
        workers = children(driver.pid) if driver.poll() is None else []
        n_killed += driver.poll() is None
        driver.kill()
        driver.communicate()
        wait_until(lambda workers=workers: not any(running(pid) for pid in workers), 10.0)
    last = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert n_killed == 8
    assert last.stdout.split()[-1] == undisturbed


def test_frozen_members_hold_a_round_up_for_the_ready_timeout_and_a_second_at_most(tmp_path: Path) -> None:
    config = tiny_population(2, ready_timeout_s=6.0, ready_check_max_wait=3, min_ready_members=2)
    executor = LocalExecutor(4, 600.0, tmp_path / "logs")
    population = Population(config, tmp_path, executor)
    frozen: list[int] = []

    def freeze_two(_: Population) -> None:
        """As soon as the first member has reported, two of the other three stop for ever."""
        if not frozen and n_lines(tmp_path) >= 2:
            busy = [w.process.pid for w in executor.workers if w.task is not None and w.task.key.split("/")[1] == "0"]
            frozen.extend(busy[:2])
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)

    try:
        scheduler = population.run(freeze_two)
    finally:
        executor.close()
    assert len(frozen) == 2
    lines = Journal(tmp_path / "population.jsonl").read()
    checks = [line["time"] for line in lines if line["event"] == "ready_check"]
    last_report = max(line["time"] for line in lines if line["event"] == "report" and line["round"] == 0)
    assert checks[2] - last_report <= 6.0 + 1.0
    assert scheduler.failed_ready_checks >= 3
    assert sum(member.score_round == 1 for member in scheduler.members) == 2
