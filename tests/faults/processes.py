"""Runs in processes of their own, to be killed: forked from a server that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tailguard.errors import TailguardError
from tailguard.run import RunFolder
from tests.runs import begin, go_on, tiny_experiment

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.runs", "tests.faults.processes", "torch.utils.tensorboard", "torch._dynamo"])


def run_process(path: str, source: str, settings: dict[str, Any]) -> None:
    """What `tailguard train` and `tailguard resume` do, without a terminal."""
    folder, experiment = RunFolder(path), tiny_experiment(source, **settings)
    try:
        (go_on if folder.config_file.exists() else begin)(folder, experiment)
    except TailguardError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(2)


def started(path: Path, source: str, settings: dict[str, Any]) -> BaseProcess:
    process = SERVER.Process(target=run_process, args=(str(path), source, settings), daemon=True)
    process.start()
    return process


def stopped_after(process: BaseProcess, seconds: float, number: signal.Signals, in_write: Path | None = None) -> bool:
    """Send a signal after a while; False when the process had ended by then, which must have gone well."""
    process.join(seconds)
    if in_write is not None:
        wait_for_write(process, in_write)
    if process.is_alive():
        assert process.pid is not None
        os.kill(process.pid, number)
        process.join(60.0)
        # it may have ended just before; and before the training begins SIGTERM ends it as it ends any other process
        assert process.exitcode in (0, -number), process.exitcode
        return process.exitcode != 0 or number == signal.SIGTERM
    assert process.exitcode == 0, process.exitcode
    return False


def wait_for_write(process: BaseProcess, checkpoints: Path) -> None:
    """Until a bundle is being written beside its place, or the process has ended."""
    while process.is_alive():
        if checkpoints.is_dir() and any(name.startswith(".step-") for name in os.listdir(checkpoints)):
            return


def timed(path: Path, source: str, settings: dict[str, Any]) -> float:
    """Seconds of an undisturbed run."""
    began = time.monotonic()
    process = started(path, source, settings)
    process.join(120.0)
    assert process.exitcode == 0
    return time.monotonic() - began
