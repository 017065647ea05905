"""Populations on a real Ray: one node, two nodes, and two of which one is lost, all with the same bits."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tailguard.errors import ConfigError, RunError
from tailguard.population.journal import Journal
from tests.faults.watching import children, n_lines, wait_until
from tests.population.tiny import digest_of, tiny_population

ray = pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # Ray's own
]
ROUNDS = 6


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return digest_of(tiny_population(ROUNDS), tmp_path_factory.mktemp("undisturbed"))


@contextmanager
def cluster(n_nodes: int) -> Iterator[Any]:
    """A Ray cluster of nodes with one CPU each, all on this machine."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        for _ in range(n_nodes - 1):
            nodes.add_node(num_cpus=1)
        nodes.wait_for_nodes()
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()


def digest_on(nodes: Any, folder: Path, hang_timeout_s: float = 600.0) -> str:
    from tailguard.population.ray_runner import RayExecutor

    executor = RayExecutor(nodes.address, hang_timeout_s, folder / "beats")
    return digest_of(tiny_population(ROUNDS), folder, executor)


@pytest.mark.parametrize("n_nodes", [1, 2])
def test_a_cluster_gives_the_population_that_one_process_gives(n_nodes: int, undisturbed: str, tmp_path: Path) -> None:
    with cluster(n_nodes) as nodes:
        assert digest_on(nodes, tmp_path) == undisturbed
    assert not list((tmp_path / "beats").iterdir())


def test_an_address_where_nobody_listens_is_one_clear_message_at_once(tmp_path: Path) -> None:
    from tailguard.population.ray_runner import RayExecutor

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # and never listens
        began = time.monotonic()
        with pytest.raises(ConfigError, match=r"no Ray cluster to join at .*`ray start --head`"):
            RayExecutor(f"127.0.0.1:{unused.getsockname()[1]}", 600.0, tmp_path)
    assert time.monotonic() - began < 15.0


def is_working(pid: int) -> bool:
    """Whether the process works on a task of ours now; Ray names it after the function."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::work")
    except OSError:
        return False  # it has just ended


def stop_one_at_work(*nodes: Any) -> int:
    """Stop a process of these nodes in the middle of its task; waits for one."""
    until = time.monotonic() + 120.0
    while time.monotonic() < until:
        for pid in [pid for node in nodes for pid in children(node.all_processes["raylet"][0].process.pid)]:
            with suppress(ProcessLookupError):
                if is_working(pid):
                    os.kill(pid, signal.SIGSTOP)
                    if is_working(pid):
                        return pid
                    os.kill(pid, signal.SIGCONT)  # it had finished
        time.sleep(0.02)
    raise AssertionError("nobody ever worked")


def test_a_task_that_hangs_is_given_up_and_done_again(undisturbed: str, tmp_path: Path) -> None:
    journal, stopped = Journal(tmp_path / "population.jsonl"), list[int]()

    def stop_one_for_a_while() -> None:
        wait_until(lambda: n_lines(tmp_path) >= 4)
        stopped.append(stop_one_at_work(*nodes.list_all_nodes()))
        time.sleep(60.0)
        with suppress(ProcessLookupError):
            os.kill(stopped[0], signal.SIGCONT)

    with cluster(2) as nodes:
        threading.Thread(target=stop_one_for_a_while, daemon=True).start()
        assert digest_on(nodes, tmp_path, hang_timeout_s=30.0) == undisturbed
    assert stopped
    assert any("no sign of life" in line["reason"] for line in journal.read() if line["event"] == "failure")


def test_a_node_that_is_lost_loses_no_member(undisturbed: str, tmp_path: Path) -> None:
    journal, lost = Journal(tmp_path / "population.jsonl"), threading.Event()

    def lose_the_second_node_at_work() -> None:
        wait_until(lambda: n_lines(tmp_path) >= 2)
        node = nodes.list_all_nodes()[-1]
        at_work = stop_one_at_work(node)
        nodes.remove_node(node, allow_graceful=False)
        with suppress(ProcessLookupError):
            os.kill(at_work, signal.SIGKILL)
        lost.set()

    with cluster(2) as nodes:
        threading.Thread(target=lose_the_second_node_at_work, daemon=True).start()
        assert digest_on(nodes, tmp_path) == undisturbed
    assert lost.is_set()
    assert any(line["event"] == "failure" for line in journal.read())


def others_work(seconds: float) -> Any:
    """A task that takes a CPU of the cluster for so long."""

    def nap() -> None:
        time.sleep(seconds)

    return ray.remote(num_cpus=1)(nap).remote()


def test_tasks_that_could_not_begin_are_waited_for_and_none_of_them_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tailguard.population import ray_runner

    monkeypatch.setattr(ray_runner, "FIRST_NOTICE_S", 12.0)
    config = tiny_population(2, max_failures=0)
    expected = digest_of(config, tmp_path / "undisturbed")
    with cluster(1) as nodes:
        executor = ray_runner.RayExecutor(nodes.address, 30.0, tmp_path / "starved" / "beats")
        busy = others_work(45.0)  # longer than the patience with tasks that have begun
        wait_until(lambda: ray.available_resources().get("CPU", 0.0) == 0.0)
        assert digest_of(config, tmp_path / "starved", executor) == expected
        del busy
    lines = Journal(tmp_path / "starved" / "population.jsonl").read()
    assert {line["event"] for line in lines} == {"start", "report"}
    said = [record.getMessage() for record in caplog.records if "tasks have waited" in record.getMessage()]
    assert len(said) == 1
    assert "4 tasks have waited" in said[0]
    assert "each needs 1 CPU, and 0 of the cluster's 1 CPUs are free" in said[0]


def test_a_cluster_on_which_nothing_ever_begins_ends_the_command_with_what_is_missing(tmp_path: Path) -> None:
    from tailguard.population.ray_runner import RayExecutor

    with cluster(1) as nodes:
        executor = RayExecutor(nodes.address, 600.0, tmp_path / "beats", start_timeout_s=4.0)
        busy = others_work(120.0)
        wait_until(lambda: ray.available_resources().get("CPU", 0.0) == 0.0)
        with pytest.raises(RunError, match=r"None of 4 tasks could begin in 4 s .*0 of the cluster's 1 CPUs are free"):
            digest_of(tiny_population(1), tmp_path, executor)
        ray.cancel(busy, force=True)
    assert [line["event"] for line in Journal(tmp_path / "population.jsonl").read()] == ["start"]
    assert digest_of(tiny_population(1), tmp_path) == digest_of(tiny_population(1), tmp_path / "undisturbed")
