"""What a run writes down per update: metrics.jsonl is the truth, TensorBoard shows it, alerts.jsonl keeps the alerts.

A resumed run goes on at its checkpoint, so lines after it are dropped first and TensorBoard's events are written anew
from the lines that stay: every update is there once.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import IO, Any

from tailguard.checkpoint import named_failure, write_file
from tailguard.errors import RunError
from tailguard.files import Fields, line_name, read_json_lines
from tailguard.run.folder import RunFolder


class Records:
    """The open files of a run; `step` is where it goes on, 0 at the start."""

    def __init__(self, folder: RunFolder, step: int) -> None:
        rows = cut(folder.metrics_file, step)
        cut(folder.alerts_file, step)
        self.folder = folder
        with named_failure(folder.path, 0):
            shutil.rmtree(folder.tensorboard, ignore_errors=True)
            folder.tensorboard.mkdir()
            self.metrics, self.alerts = folder.metrics_file.open("ab"), folder.alerts_file.open("ab")
            self.events = Events(folder.tensorboard)
            for row in rows:
                self.events.add(row)

    def add(self, row: Mapping[str, Any], alerts: Iterable[Mapping[str, Any]]) -> None:
        """One update: its row, and the alerts that began; handed to the system at once, so that a kill loses none."""
        with named_failure(self.folder.path, 0):
            for alert in alerts:
                self.alerts.write(line_of(alert))
            self.metrics.write(line_of(row))
            self.events.add(row)
            for file in self.files():
                file.flush()

    def sync(self) -> None:
        """Wait until every row is on the disk: a checkpoint never knows more than the records."""
        if not self.folder.metrics_file.exists():
            raise RunError(f"{self.folder.path} was removed while its training ran; there is nowhere left to write to.")
        with named_failure(self.folder.path, 0):
            for file in self.files():
                os.fsync(file.fileno())

    def close(self) -> None:
        """Let go of the files; what a full disk no longer took is already said."""
        for file in self.files():
            with suppress(OSError):
                file.close()

    def files(self) -> tuple[IO[bytes], ...]:
        return self.metrics, self.alerts, self.events.file


class Events:
    """TensorBoard's event file, written in place: its own writer has a thread that dies with a full disk."""

    def __init__(self, folder: Path) -> None:
        # slow to import, and only needed while writing
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        self.event = Event
        self.file: IO[bytes] = (folder / f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}").open("wb")
        self.writer = RecordWriter(self.file)
        self.put(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, row: Mapping[str, Any]) -> None:
        """One row as scalars."""
        event = self.event(wall_time=row.get("time"), step=row["step"])
        for name, value in row.items():
            if "/" in name and isinstance(value, int | float):
                event.summary.value.add(tag=name, simple_value=value)
        self.put(event)

    def put(self, event: Any) -> None:
        self.writer.write(event.SerializeToString())


def line_of(row: Mapping[str, Any]) -> bytes:
    """One JSON line; what is not finite is null."""
    finite = {name: None if isinstance(value, float) and not isfinite(value) else value for name, value in row.items()}
    return json.dumps(finite).encode() + b"\n"


def cut(file: Path, step: int) -> list[dict[str, Any]]:
    """Keep the lines up to a step and return them; a torn last line goes too."""
    if not file.exists():
        return []
    rows = [row for row in rows_of(file) if row["step"] <= step]
    write_file(file, b"".join(map(line_of, rows)))
    return rows


def rows_of(file: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a JSON-lines file, their fields checked; only the last may be torn by a kill."""
    for number, row in read_json_lines(file, RunError):
        fields = Fields(row, line_name(file, number), RunError)
        fields.count("step")
        if row.get("time") is not None:
            fields.number("time")
        if "alert" in row:
            fields.text("alert")
        yield row
