"""What fault injection looks at: how far a population is, and who runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def n_lines(folder: Path) -> int:
    file = folder / "population.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_until(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.01)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
