"""What a run writes down per update: metrics.jsonl is the truth, TensorBoard shows it, alerts.jsonl keeps the alerts.

A resumed run goes on at its checkpoint, so lines after it are dropped first and TensorBoard's events are written anew
from the lines that stay: every update is there once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import IO, Any

from tailguard.checkpoint import named_failure, write_file
from tailguard.errors import RunError
from tailguard.run.folder import RunFolder


class Records:
    """The open files of a run; `step` is where it goes on, 0 at the start."""

    def __init__(self, folder: RunFolder, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only needed while writing

        rows = cut(folder.metrics_file, step)
        cut(folder.alerts_file, step)
        with named_failure(folder.path, 0):
            shutil.rmtree(folder.tensorboard, ignore_errors=True)
            self.writer: SummaryWriter = SummaryWriter(str(folder.tensorboard))
            self.metrics, self.alerts = folder.metrics_file.open("a"), folder.alerts_file.open("a")
        self.n_rows = len(rows)
        for row in rows:
            self.show(row)

    def add(self, row: Mapping[str, Any], alerts: Iterable[Mapping[str, Any]]) -> None:
        """One update: its row, and the alerts that began."""
        for alert in alerts:
            append(self.alerts, alert)
        append(self.metrics, row)
        self.n_rows += 1
        self.show(row)

    def show(self, row: Mapping[str, Any]) -> None:
        """One row as TensorBoard's scalars."""
        for name, value in row.items():
            if "/" in name and isinstance(value, int | float):
                self.writer.add_scalar(name, value, row["step"], walltime=row.get("time"))

    def sync(self) -> None:
        """Wait until every row is on the disk: a checkpoint never knows more than the records."""
        with named_failure(Path(self.metrics.name), 0):
            for file in (self.metrics, self.alerts):
                file.flush()
                os.fsync(file.fileno())
            self.writer.flush()

    def close(self) -> None:
        for file in (self.metrics, self.alerts, self.writer):
            file.close()


def append(file: IO[str], row: Mapping[str, Any]) -> None:
    """One JSON line, handed to the system at once so that a kill loses none."""
    finite = {name: None if isinstance(value, float) and not isfinite(value) else value for name, value in row.items()}
    with named_failure(Path(file.name), 0):
        file.write(json.dumps(finite) + "\n")
        file.flush()


def cut(file: Path, step: int) -> list[dict[str, Any]]:
    """Keep the lines up to a step and return them; a torn last line goes too."""
    if not file.exists():
        return []
    rows = [row for row in rows_of(file) if row["step"] <= step]
    write_file(file, "".join(json.dumps(row) + "\n" for row in rows).encode())
    return rows


def rows_of(file: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSON-lines file; only the last may be torn by a kill."""
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.strip() else None
        except ValueError:
            if number >= len(lines) - 1:
                return
            raise RunError(f"{file}, line {number} is damaged: {line[:80]!r}. Remove that line and resume.") from None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row
