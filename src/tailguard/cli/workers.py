"""Where the work of a command is done, processes of this machine or a Ray cluster, and how it is stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import typer

from tailguard.errors import ConfigError
from tailguard.population.local import LocalExecutor
from tailguard.population.tasks import START_TIMEOUT_S, Executor, Outcome, Task
from tailguard.run import StoppedNow
from tailguard.run.signals import StopSignals

SHOW_CURSOR = b"\x1b[?25h"


def executor_of(
    folder: Path,
    n_tasks: int,
    hang_timeout_s: float,
    workers: int | None,
    ray_address: str | None,
    start_timeout_s: float = START_TIMEOUT_S,
) -> Executor:
    """Processes on this machine, or tasks of a Ray cluster."""
    if ray_address is not None:
        try:
            from tailguard.population.ray_runner import RayExecutor
        except ImportError:
            raise ConfigError("--ray needs Ray, which is not installed: pip install 'tailguard[ray]'.") from None
        return RayExecutor(ray_address, hang_timeout_s, folder / "beats", workers, start_timeout_s)
    n_workers = workers if workers is not None else min(os.cpu_count() or 1, n_tasks)
    return LocalExecutor(n_workers, hang_timeout_s, folder / "logs")


@contextmanager
def working(make: Callable[[], Executor], again: str) -> Iterator[Executor]:
    """An executor that is closed at the end. A stop signal ends its work within a second, and a line says how to go on;
    a second signal ends this process at once."""
    with WorkStop() as stop:
        executor = make()
        try:
            yield StoppableExecutor(executor, stop)
        except StoppedNow as stopped:
            with suppress(OSError):
                typer.echo(f"{stopped}; {again}", err=True)
            raise typer.Exit(stopped.exit_code) from None
        finally:
            executor.close()


class WorkStop(StopSignals):
    """Stop signals while others work for this process: all that is finished is on the disk.

    The first is only remembered, for it may arrive inside a library that cannot be left by an exception. The second
    ends the process where it stands, with all that it started: agents of a local Ray would outlive it.
    """

    def again(self, signum: int) -> None:
        with suppress(OSError):
            if os.isatty(1):
                os.write(1, SHOW_CURSOR)  # a display that redraws itself has hidden it
        with suppress(OSError):
            os.write(2, f"{signal.Signals(signum).name}: ended at once\n".encode())
        for pid in descendants(os.getpid()):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        os._exit(128 + signum)


def descendants(pid: int) -> list[int]:
    """Processes that a process started, and what these started; none where the system does not tell."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has just ended
            for child in file.read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


class StoppableExecutor:
    """An executor that ends its work, by `StoppedNow`, when a stop was asked for."""

    def __init__(self, executor: Executor, stop: WorkStop) -> None:
        self.executor, self.stop = executor, stop

    @property
    def starved(self) -> bool:
        return self.executor.starved

    def submit(self, task: Task) -> None:
        self.executor.submit(task)

    def cancel(self, key: str) -> None:
        self.executor.cancel(key)

    def wait(self, timeout_s: float) -> list[Outcome]:
        self.end_if_asked()
        outcomes = self.executor.wait(timeout_s)
        self.end_if_asked()
        return outcomes

    def close(self) -> None:
        self.executor.close()

    def end_if_asked(self) -> None:
        if self.stop.signum is not None:
            raise StoppedNow(self.stop.signum)
