"""`--ray local`: nothing of it can be reached from outside, signals end it cleanly, and nothing of it stays."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tailguard.population.config import load_population
from tailguard.population.journal import Journal
from tests.faults.watching import descendants, is_loopback, listening, n_lines, running, wait_until
from tests.population.tiny import digest_of, tiny_population

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("default")  # Ray's own
ROUNDS = 4


def test_a_ray_of_our_own_is_begun_on_the_loopback_interface_and_others_are_joined_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ray._private import services

    from tailguard.population import ray_runner

    given: list[tuple[dict[str, Any], str, str | None]] = []

    def init(**options: Any) -> None:
        variable = os.environ.get(ray_runner.CLUSTERS_ALLOWED)
        given.append((options, services.resolve_ip_for_localhost("127.0.0.1"), variable))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeManagerAddress": "127.0.0.1"}])
    before = services.resolve_ip_for_localhost("127.0.0.1")
    ray_runner.connect("local", {"num_cpus": 2})
    ray_runner.connect("auto", {})
    (own, taken, variable), (other, replaced, untouched) = given
    assert (own["address"], own["_node_ip_address"], own["include_dashboard"]) == ("local", "127.0.0.1", False)
    assert (taken, variable) == ("127.0.0.1", "0")
    assert other["address"] == "auto"
    assert "_node_ip_address" not in other
    assert (replaced, untouched) == (before, None)
    assert services.resolve_ip_for_localhost("127.0.0.1") == before


def test_a_ray_that_listens_elsewhere_all_the_same_is_ended_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from tailguard.errors import RunError
    from tailguard.population import ray_runner

    ended: list[bool] = []
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeManagerAddress": "192.0.2.2"}])
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    with pytest.raises(RunError, match=r"would listen on 192\.0\.2\.2"):
        ray_runner.begin_local({})
    assert ended == [True]


@contextmanager
def population_on_local_ray(place: Path) -> Iterator[subprocess.Popen[str]]:
    """`tailguard population --ray local` in a process of its own, in the middle of its first round."""
    file = place / "population.yaml"
    file.write_text(tiny_population(ROUNDS).to_yaml())
    command = [sys.executable, "-m", "tailguard.cli", "population", str(file), "--ray", "local", "--workers", "2"]
    process = subprocess.Popen(
        [*command, "--run", "p", "--quiet"], cwd=place, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: n_lines(place / "runs" / "p") >= 3)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_ray_local_listens_on_loopback_alone(tmp_path: Path) -> None:
    with population_on_local_ray(tmp_path) as process:
        seen = listening([process.pid, *descendants(process.pid)])
    assert len(seen) >= 4  # the driver, the head's server, the node's, and its workers
    assert [(pid, address) for pid, held in seen.items() for address in held if not is_loopback(address)] == []


def test_the_search_for_listeners_finds_those_on_all_interfaces() -> None:
    with socket.create_server(("0.0.0.0", 0)), socket.create_server(("127.0.0.1", 0)):  # noqa: S104
        held = listening([os.getpid()])[os.getpid()]
    assert {"0.0.0.0", "127.0.0.1"} <= held  # noqa: S104
    assert is_loopback("127.0.0.1")
    assert not is_loopback("0.0.0.0")  # noqa: S104


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_stop_signal_ends_a_ray_population_cleanly_and_it_goes_on_to_the_same_bits(
    number: signal.Signals, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "p"
    with population_on_local_ray(tmp_path) as process:
        started = descendants(process.pid)
        process.send_signal(number)
        _, said = process.communicate(timeout=60.0)
        assert process.returncode == 128 + number, said
        assert f"stopped by {number.name}; nothing is lost: `tailguard resume p` goes on." in said
        for words in ("SystemError", "Traceback", "Error"):
            assert words not in said, said
        wait_until(lambda: not any(running(pid) for pid in started), 20.0)
    assert started
    lines = Journal(folder / "population.jsonl").read()
    assert lines
    assert not any(line["event"] == "failure" for line in lines)
    config = load_population(folder / "config.yaml")
    assert digest_of(config, folder) == digest_of(config, tmp_path / "undisturbed")


@pytest.mark.slow
def test_the_second_signal_ends_a_ray_population_at_once_and_leaves_no_process(tmp_path: Path) -> None:
    with population_on_local_ray(tmp_path) as process:
        started = descendants(process.pid)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20.0)
        assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)  # it may just have ended
        wait_until(lambda: not any(running(pid) for pid in started), 20.0)
