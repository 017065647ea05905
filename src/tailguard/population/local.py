"""The local executor: worker processes on this machine, no server."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tailguard.errors import ConfigError
from tailguard.population.tasks import Outcome, Task

LONGEST_SLEEP_S = 0.5
MOST_WORKERS = 1024


@dataclass
class Worker:
    """One process, the pipe its outcomes come through, and the task it works on."""

    process: subprocess.Popen[bytes]
    pipe: IO[bytes]
    task: Task | None = None
    last_sign: float = field(default_factory=time.monotonic)
    received: bytes = b""

    @classmethod
    def spawn(cls, log: Path) -> Worker:
        """A fresh interpreter in a process group of its own, so that it can be ended with all its children."""
        read_end, write_end = os.pipe()
        with log.open("ab") as log_file:
            process = subprocess.Popen(
                [sys.executable, "-m", "tailguard.population.worker", str(write_end)],
                stdin=subprocess.PIPE,
                stdout=log_file,
                stderr=log_file,
                pass_fds=(write_end,),
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            )
        os.close(write_end)
        os.set_blocking(read_end, False)
        return cls(process, os.fdopen(read_end, "rb", buffering=0))

    def give(self, task: Task) -> None:
        self.task, self.last_sign = task, time.monotonic()
        line = json.dumps({"key": task.key, "kind": task.kind, "payload": dict(task.payload)})
        if self.process.stdin is None:
            raise ConfigError("A worker without stdin cannot be given tasks.")
        with suppress(BrokenPipeError):  # it may just have died: `wait` sees the end of its pipe
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def hear(self) -> tuple[list[dict[str, Any]], bool]:
        """Messages that have come, and whether the pipe has ended."""
        ended = False
        with suppress(BlockingIOError):
            while not ended:
                data = os.read(self.pipe.fileno(), 1 << 16)
                ended = not data
                self.received += data
        *lines, self.received = self.received.split(b"\n")
        if lines:
            self.last_sign = time.monotonic()
        return [json.loads(line) for line in lines], ended

    def end(self) -> None:
        """End the process and its children at once, also when it is stopped."""
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.pipe.close()
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()


class LocalExecutor:
    """At most `n_workers` processes that take tasks in turn; one that dies or hangs is replaced.

    A task whose process gives no sign of life for `hang_timeout_s` is ended and reported as failed.
    """

    starved = False

    def __init__(self, n_workers: int, hang_timeout_s: float, log_folder: str | Path) -> None:
        if n_workers < 1:
            raise ConfigError(f"{n_workers} workers cannot work. Use --workers 1 or more.")
        if n_workers > MOST_WORKERS:
            raise ConfigError(f"{n_workers} workers are more than {MOST_WORKERS}. Use about one per core.")
        self.n_workers, self.hang_timeout_s = n_workers, hang_timeout_s
        self.log_folder = Path(log_folder)
        self.log_folder.mkdir(parents=True, exist_ok=True)
        self.waiting: deque[Task] = deque()
        self.workers: list[Worker] = []
        self.selector = selectors.DefaultSelector()
        self.n_spawned = 0

    def submit(self, task: Task) -> None:
        self.waiting.append(task)
        self.dispatch()

    def cancel(self, key: str) -> None:
        self.waiting = deque(task for task in self.waiting if task.key != key)
        for worker in [worker for worker in self.workers if worker.task is not None and worker.task.key == key]:
            self.discard(worker)
        self.dispatch()

    def wait(self, timeout_s: float) -> list[Outcome]:
        until = time.monotonic() + timeout_s
        while True:
            outcomes = self.collect(min(max(until - time.monotonic(), 0.0), LONGEST_SLEEP_S))
            self.dispatch()
            if outcomes or time.monotonic() >= until:
                return outcomes

    def close(self) -> None:
        self.waiting.clear()
        for worker in list(self.workers):
            self.discard(worker)
        self.selector.close()

    def dispatch(self) -> None:
        """Give waiting tasks to idle workers, spawning new ones up to the limit."""
        while self.waiting:
            idle = next((worker for worker in self.workers if worker.task is None), None)
            if idle is None:
                if len(self.workers) >= self.n_workers:
                    return
                idle = Worker.spawn(self.log_folder / f"worker-{self.n_spawned}.log")
                self.n_spawned += 1
                self.workers.append(idle)
                self.selector.register(idle.pipe, selectors.EVENT_READ, idle)
            idle.give(self.waiting.popleft())

    def collect(self, timeout_s: float) -> list[Outcome]:
        """What the workers have to say, who has died, and who hangs."""
        outcomes: list[Outcome] = []
        for key, _ in self.selector.select(timeout_s):
            worker: Worker = key.data
            messages, ended = worker.hear()
            for message in messages:
                if worker.task is not None and message["key"] == worker.task.key and "beat" not in message:
                    outcomes.append(Outcome(worker.task.key, message.get("result"), message.get("reason", "")))
                    worker.task = None
            if ended:
                outcomes += self.lost(worker, "its process ended")
        for worker in list(self.workers):
            silent = time.monotonic() - worker.last_sign
            if worker.task is not None and silent > self.hang_timeout_s:
                outcomes += self.lost(worker, f"no sign of life for {silent:.0f} s")
        return outcomes

    def lost(self, worker: Worker, reason: str) -> list[Outcome]:
        """The outcome of what a dead or hanging worker was doing."""
        task = worker.task
        self.discard(worker)
        log = self.log_folder.resolve()
        return [Outcome(task.key, None, f"{reason}, exit code {worker.process.returncode}; see {log}")] if task else []

    def discard(self, worker: Worker) -> None:
        self.selector.unregister(worker.pipe)
        self.workers.remove(worker)
        worker.end()
