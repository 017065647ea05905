"""The journal of a population: what happened, one fsynced JSON line per event. Restarting is replaying it.

Every line says which line it is, so that one that was lost, moved or written twice is found.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import isfinite, nan
from pathlib import Path
from typing import Any

from tailguard.checkpoint import sync_directory
from tailguard.errors import CheckpointError
from tailguard.files import LARGEST_LINES, Fields, json_object, line_name, read_regular
from tailguard.population.scheduler import Event, Failure, ReadyCheck, Report

KINDS = ("report", "failure", "ready_check")
MARKS = ("start", "resume")


class Journal:
    """An append-only file; an event counts when its line is on the disk, and a torn last line never happened."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.n_lines: int | None = None  # known once it has been read

    def read(self) -> list[dict[str, Any]]:
        """Every whole line, its fields checked; what a crash left of a last one is cut off."""
        if not self.path.exists():
            self.n_lines = 0
            return []
        data = read_regular(self.path, LARGEST_LINES, CheckpointError)
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) != len(data):
            os.truncate(self.path, len(whole))
        lines = [self.parsed(number, line) for number, line in enumerate(whole.split(b"\n")[:-1], 1)]
        self.n_lines = len(lines)
        return lines

    def parsed(self, number: int, data: bytes) -> dict[str, Any]:
        """One line; an error names it and the field that is wrong."""
        where = line_name(self.path, number)
        try:
            line = json_object(data, where, CheckpointError)
            fields = Fields(line, where, CheckpointError)
            if "line" in line and fields.count("line") != number:
                raise CheckpointError(f"{where} says that it is line {line['line']}: lines were lost, moved or added.")
            if fields.text("event") in KINDS:
                event_of(line, where)
            elif line["event"] not in MARKS:
                raise fields.wrong("event", f"one of {', '.join((*KINDS, *MARKS))}")
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}\nThe journal is damaged or was edited, and a population cannot be resumed without it: put a "
                "copy of it back, or start anew."
            ) from None
        return line

    def events(self) -> list[Event]:
        """What the scheduler is to be told again."""
        return [event_of(line) for line in self.read() if line["event"] in KINDS]

    def append(self, event: Event | str, **about: Any) -> None:
        """Write one event durably; `about` is for readers, and for the check that a replay arrives at the same."""
        if self.n_lines is None:
            self.read()
        fresh = not self.path.exists()
        number = (self.n_lines or 0) + 1
        line = {**(line_of(event) if not isinstance(event, str) else {"event": event}), **about, "line": number}
        with self.path.open("ab") as file:
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.n_lines = number
        if fresh:
            sync_directory(self.path.parent)


def line_of(event: Event) -> dict[str, Any]:
    """An event as plain values; JSON has no NaN, so a score that is not finite is null."""
    if isinstance(event, ReadyCheck):
        return {"event": "ready_check"}
    if isinstance(event, Failure):
        return {"event": "failure", **vars(event)}
    return {"event": "report", **vars(event), "score": event.score if isfinite(event.score) else None}


def event_of(line: Mapping[str, Any], where: str = "The line") -> Event:
    """The event that `line_of` wrote; earlier versions kept no figures and no alerts."""
    if line["event"] == "ready_check":
        return ReadyCheck()
    fields = Fields({"figures": {}, "alerts": {}, **line}, where, CheckpointError)
    member, finished_round = fields.count("member"), fields.count("round")
    if line["event"] == "failure":
        return Failure(member, finished_round, fields.count("attempt"), fields.text("reason"))
    score = fields.number_or_none("score")
    bundle = fields.text_or_none("bundle")
    kept = fields.numbers("figures"), fields.numbers("alerts")
    return Report(member, finished_round, nan if score is None else score, bundle, *kept)
