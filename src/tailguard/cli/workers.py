"""Where the work of a command is done, processes of this machine or a Ray cluster, and how it is stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import typer

from tailguard.errors import ConfigError
from tailguard.population.local import LocalExecutor
from tailguard.population.tasks import Executor
from tailguard.run import StoppedNow


def executor_of(
    folder: Path, n_tasks: int, hang_timeout_s: float, workers: int | None, ray_address: str | None
) -> Executor:
    """Processes on this machine, or tasks of a Ray cluster."""
    if ray_address is not None:
        try:
            from tailguard.population.ray_runner import RayExecutor
        except ImportError:
            raise ConfigError("--ray needs Ray, which is not installed: pip install 'tailguard[ray]'.") from None
        return RayExecutor(ray_address, hang_timeout_s, folder / "beats", workers)
    n_workers = workers if workers is not None else min(os.cpu_count() or 1, n_tasks)
    return LocalExecutor(n_workers, hang_timeout_s, folder / "logs")


@contextmanager
def working(executor: Executor, again: str) -> Iterator[None]:
    """While an executor works: it is closed at the end, and a stop says how to go on."""
    try:
        with stopped_by_signals():
            yield
    except StoppedNow as stop:
        typer.echo(f"{stop}; {again}", err=True)
        raise typer.Exit(stop.exit_code) from None
    finally:
        executor.close()


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the work at once: all that is finished is on the disk."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise StoppedNow(signum)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
