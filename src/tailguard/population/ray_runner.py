"""The Ray executor: tasks of a Ray cluster whose nodes share the population's folder. Only this module imports ray.

    pip install 'tailguard[ray]'

Ray carries JSON text in both directions and nothing else; agents travel as bundles through the shared path. Whoever
reaches the ports of a Ray cluster can run code on it, so a Ray that we start listens on the loopback interface alone.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray.exceptions import LocalRayletDiedError, NodeDiedError, RayError, WorkerCrashedError

from tailguard.errors import ConfigError, RunError
from tailguard.population.tasks import START_TIMEOUT_S, Outcome, Task, perform
from tailguard.run import StoppedNow

log = logging.getLogger(__name__)

KNOCK_TIMEOUT_S = 10.0
LOOPBACK = "127.0.0.1"
FIRST_NOTICE_S, NOTICE_INTERVAL_S = 15.0, 300.0
"""Waiting for free resources after which it is said for the first time, and between two further times."""
MAX_RESTARTS = 10
"""Of a task whose worker or node was lost before the task had begun."""
LOST = (LocalRayletDiedError, NodeDiedError, WorkerCrashedError)
CLUSTERS_ALLOWED = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def work(task_json: str, beat_file: str) -> str:
    """What a node does: JSON in, JSON out; a sign of life is a touched file on the shared path."""
    task, sign = json.loads(task_json), Path(beat_file)
    sign.parent.mkdir(parents=True, exist_ok=True)
    sign.touch()
    try:
        return json.dumps({"result": dict(perform(task["kind"], task["payload"], sign.touch))})
    except (Exception, StoppedNow) as error:
        return json.dumps({"reason": f"{type(error).__name__}: {error}"})


def connect(address: str, options: dict[str, Any]) -> None:
    """Join a running cluster, or begin one that ends with us; an address that answers nobody is the user's to mend."""
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR, **options}
    try:
        knock(address)
        with own_signals():
            if address == "local":
                begin_local(options)
            else:
                ray.init(address=address, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"There is no Ray cluster to join at {address!r}: {str(error).splitlines()[0]}. "
            "Give the address that `ray start --head` printed, or --ray local for one on this machine."
        ) from None


def begin_local(options: dict[str, Any]) -> None:
    """A Ray on this machine that ends with us and that no other machine can reach."""
    with loopback_allowed():
        ray.init(address="local", _node_ip_address=LOOPBACK, dashboard_host=LOOPBACK, **options)
    reached_at = {str(node["NodeManagerAddress"]) for node in ray.nodes()}  # type: ignore[no-untyped-call]
    if not all(ipaddress.ip_address(address).is_loopback for address in reached_at):
        ray.shutdown()
        raise RunError(
            f"Ray {ray.__version__} would listen on {', '.join(sorted(reached_at))}, where other machines reach it and "
            "can run code; it was ended. Use worker processes (--workers), or another version of Ray."
        )


@contextmanager
def loopback_allowed() -> Iterator[None]:
    """Have Ray take the loopback address it is given; elsewhere than on macOS and Windows it would put the machine's
    own in its place, and then listen on all interfaces."""
    constant, variable = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(CLUSTERS_ALLOWED)
    ray_constants.ENABLE_RAY_CLUSTER, os.environ[CLUSTERS_ALLOWED] = False, "0"  # of this process, of those it starts
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = constant
        del os.environ[CLUSTERS_ALLOWED]
        if variable is not None:
            os.environ[CLUSTERS_ALLOWED] = variable


@contextmanager
def own_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself when it begins; whoever handled it before goes on doing so."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler != signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


def knock(address: str) -> None:
    """See that somebody listens at host:port: Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), KNOCK_TIMEOUT_S).close()


@dataclass
class Submitted:
    """A task that Ray has, and when it last gave a sign of life."""

    task: Task
    sign: Path
    restarts: int = 0
    seen: float | None = None
    """The file's time stamp when it was last looked at; None before the task has begun."""
    at: float = field(default_factory=time.monotonic)
    """When that was new, by this machine's monotonic clock: clocks of nodes are never compared."""

    @property
    def began(self) -> bool:
        return self.seen is not None or self.sign.exists()

    def look(self) -> None:
        """Take in a new sign of life."""
        stamp = self.sign.stat().st_mtime if self.sign.exists() else None
        if stamp != self.seen:
            self.seen, self.at = stamp, time.monotonic()


class RayExecutor:
    """Every task is a Ray task on one CPU; retries are ours, so Ray makes none.

    A task that has begun and gives no sign of life for `hang_timeout_s` is stopped and reported as failed. One that has
    not begun never fails: it waits, and when none of ours could begin for `start_timeout_s`, a `RunError` says why.

    address: of a running cluster, or "local" for one on this machine that ends with us
    """

    def __init__(
        self,
        address: str,
        hang_timeout_s: float,
        beat_folder: str | Path,
        n_cpus: int | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.hang_timeout_s, self.beat_folder = hang_timeout_s, Path(beat_folder).resolve()
        self.start_timeout_s = start_timeout_s
        self.submitted: dict[Any, Submitted] = {}
        self.waiting_since: float | None = None  # that everything submitted waits for resources
        self.next_notice = FIRST_NOTICE_S
        options: dict[str, Any] = {"num_cpus": n_cpus} if address == "local" else {}
        self.ours = not ray.is_initialized()
        if self.ours:
            connect(address, options)
        self.remote = ray.remote(num_cpus=1, max_retries=0)(work)

    @property
    def starved(self) -> bool:
        return self.waiting_since is not None

    def submit(self, task: Task, restarts: int = 0) -> None:
        sign = self.beat_folder / f"{task.key.replace('/', '-')}-{time.monotonic_ns()}"
        text = json.dumps({"kind": task.kind, "payload": dict(task.payload)})
        self.submitted[self.remote.remote(text, str(sign))] = Submitted(task, sign, restarts)

    def cancel(self, key: str) -> None:
        for reference in [ref for ref, known in self.submitted.items() if known.task.key == key]:
            self.forget(reference, stop=True)

    def wait(self, timeout_s: float) -> list[Outcome]:
        if not self.submitted:
            time.sleep(timeout_s)
            return []
        ready, _ = ray.wait(list(self.submitted), num_returns=1, timeout=timeout_s)
        outcomes = [outcome for reference in ready if (outcome := self.outcome(reference)) is not None]
        return outcomes or self.silent()

    def close(self) -> None:
        for reference in list(self.submitted):
            self.forget(reference, stop=True)
        if self.ours:
            ray.shutdown()

    def outcome(self, reference: Any) -> Outcome | None:
        """What a finished task says; a node that is gone takes its tasks with it. None for one that begins anew."""
        known = self.submitted[reference]
        self.waiting_since = None
        try:
            said = json.loads(ray.get(reference))
            return Outcome(known.task.key, said.get("result"), said.get("reason", ""))
        except LOST as error:
            if not known.began and known.restarts < MAX_RESTARTS:
                log.warning("Task %s was lost before it began, and is submitted again.", known.task.key)
                self.submit(known.task, known.restarts + 1)
                return None
            return failed(known, error)
        except RayError as error:
            return failed(known, error)
        finally:
            self.forget(reference, stop=False)

    def silent(self) -> list[Outcome]:
        """Tasks that began and give no sign of life any more: they are stopped and reported as failed."""
        now = time.monotonic()
        for known in self.submitted.values():
            known.look()
        hanging = [
            reference
            for reference, known in self.submitted.items()
            if known.seen is not None and now - known.at > self.hang_timeout_s
        ]
        reason = f"no sign of life for {self.hang_timeout_s:.0f} s"
        outcomes = [Outcome(self.submitted[reference].task.key, None, reason) for reference in hanging]
        for reference in hanging:
            self.forget(reference, stop=True)
        self.note_starvation(now)
        return outcomes

    def note_starvation(self, now: float) -> None:
        """While nothing of ours could begin: say so now and then, and end it after too long."""
        if not self.submitted or any(known.seen is not None for known in self.submitted.values()):
            self.waiting_since = None
            return
        if self.waiting_since is None:
            self.waiting_since, self.next_notice = now, FIRST_NOTICE_S
        waited = now - self.waiting_since
        if waited > self.start_timeout_s:
            raise RunError(
                f"None of {len(self.submitted)} tasks could begin in {self.start_timeout_s:g} s (start_timeout_s): "
                f"{resources()}. What is finished stays: free some, add nodes, and go on."
            )
        if waited >= self.next_notice:
            self.next_notice = waited + NOTICE_INTERVAL_S
            log.warning(
                "%d tasks have waited %.0f s for the Ray cluster to begin one of them: %s. They begin when it can; "
                "after %g s (start_timeout_s) the command ends, and what is finished stays.",
                len(self.submitted),
                waited,
                resources(),
                self.start_timeout_s,
            )

    def forget(self, reference: Any, stop: bool) -> None:
        known = self.submitted.pop(reference)
        if stop:
            ray.cancel(reference, force=True)
        known.sign.unlink(missing_ok=True)


def failed(known: Submitted, error: RayError) -> Outcome:
    """The outcome of a task that Ray says has failed."""
    return Outcome(known.task.key, None, f"{type(error).__name__}: {str(error).splitlines()[0]}")


def resources() -> str:
    """What a task needs and what the cluster has, in words."""
    there = float(ray.cluster_resources().get("CPU", 0.0))  # type: ignore[no-untyped-call]
    free = float(ray.available_resources().get("CPU", 0.0))  # type: ignore[no-untyped-call]
    return f"each needs 1 CPU, and {free:g} of the cluster's {there:g} CPUs are free"
