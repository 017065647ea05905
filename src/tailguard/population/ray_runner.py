"""The Ray executor: tasks of a Ray cluster whose nodes share the population's folder. Only this module imports ray.

    pip install 'tailguard[ray]'

Ray carries JSON text in both directions and nothing else; agents travel as bundles through the shared path.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from tailguard.errors import ConfigError
from tailguard.population.tasks import Outcome, Task, perform
from tailguard.run import StoppedNow

KNOCK_TIMEOUT_S = 10.0


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
    try:
        knock(address)
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"There is no Ray cluster to join at {address!r}: {str(error).splitlines()[0]}. "
            "Give the address that `ray start --head` printed, or --ray local for one on this machine."
        ) from None


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
    seen: float | None = None
    """The file's time stamp when it was last looked at; None before the task has begun."""
    at: float = field(default_factory=time.monotonic)
    """When that was new, by this machine's monotonic clock: clocks of nodes are never compared."""

    def look(self) -> bool:
        """Whether there is a new sign of life."""
        stamp = self.sign.stat().st_mtime if self.sign.exists() else None
        if stamp == self.seen:
            return False
        self.seen, self.at = stamp, time.monotonic()
        return True


class RayExecutor:
    """Every task is a Ray task on one CPU; retries are ours, so Ray makes none.

    address: of a running cluster, or "local" for one on this machine that ends with us
    """

    def __init__(self, address: str, hang_timeout_s: float, beat_folder: str | Path, n_cpus: int | None = None) -> None:
        self.hang_timeout_s, self.beat_folder = hang_timeout_s, Path(beat_folder).resolve()
        self.submitted: dict[Any, Submitted] = {}
        self.last_sign = time.monotonic()
        options: dict[str, Any] = {"num_cpus": n_cpus} if address == "local" else {}
        self.ours = not ray.is_initialized()
        if self.ours:
            connect(address, options)
        self.remote = ray.remote(num_cpus=1, max_retries=0)(work)

    def submit(self, task: Task) -> None:
        sign = self.beat_folder / f"{task.key.replace('/', '-')}-{time.monotonic_ns()}"
        text = json.dumps({"kind": task.kind, "payload": dict(task.payload)})
        self.submitted[self.remote.remote(text, str(sign))] = Submitted(task, sign)

    def cancel(self, key: str) -> None:
        for reference in [ref for ref, known in self.submitted.items() if known.task.key == key]:
            self.forget(reference, stop=True)

    def wait(self, timeout_s: float) -> list[Outcome]:
        if not self.submitted:
            time.sleep(timeout_s)
            return []
        ready, _ = ray.wait(list(self.submitted), num_returns=1, timeout=timeout_s)
        return [self.outcome(reference) for reference in ready] or self.silent()

    def close(self) -> None:
        for reference in list(self.submitted):
            self.forget(reference, stop=True)
        if self.ours:
            ray.shutdown()

    def outcome(self, reference: Any) -> Outcome:
        """What a finished task says; a node that is gone takes its tasks with it."""
        key = self.submitted[reference].task.key
        try:
            said = json.loads(ray.get(reference))
            return Outcome(key, said.get("result"), said.get("reason", ""))
        except RayError as error:
            return Outcome(key, None, f"{type(error).__name__}: {str(error).splitlines()[0]}")
        finally:
            self.last_sign = time.monotonic()
            self.forget(reference, stop=False)

    def silent(self) -> list[Outcome]:
        """Tasks without a sign of life: they are stopped and reported as failed.

        A task that waits for a free CPU is not silent, unless nothing else in the cluster moves either.
        """
        now = time.monotonic()
        moved = [known.task.key for known in self.submitted.values() if known.look()]
        if moved:
            self.last_sign = now
        hanging = [
            reference
            for reference, known in self.submitted.items()
            if now - (known.at if known.seen is not None else max(known.at, self.last_sign)) > self.hang_timeout_s
        ]
        reason = f"no sign of life for {self.hang_timeout_s:.0f} s"
        outcomes = [Outcome(self.submitted[reference].task.key, None, reason) for reference in hanging]
        for reference in hanging:
            self.forget(reference, stop=True)
        return outcomes

    def forget(self, reference: Any, stop: bool) -> None:
        known = self.submitted.pop(reference)
        if stop:
            ray.cancel(reference, force=True)
        known.sign.unlink(missing_ok=True)
