"""The journal of a population: what happened, one fsynced JSON line per event. Restarting is replaying it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import isfinite, nan
from pathlib import Path
from typing import Any

from tailguard.checkpoint import sync_directory
from tailguard.errors import CheckpointError
from tailguard.population.scheduler import Event, Failure, ReadyCheck, Report


class Journal:
    """An append-only file; an event counts when its line is on the disk, and a torn last line never happened."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def read(self) -> list[dict[str, Any]]:
        """Every whole line; what a crash left of a last one is cut off."""
        if not self.path.exists():
            return []
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) != len(data):
            os.truncate(self.path, len(whole))
        try:
            return [dict(json.loads(line)) for line in whole.splitlines()]
        except ValueError as error:
            raise CheckpointError(
                f"{self.path} is damaged: {error}. A population cannot be resumed without its journal; start anew."
            ) from None

    def events(self) -> list[Event]:
        """What the scheduler is to be told again."""
        return [event_of(line) for line in self.read() if line["event"] in KINDS]

    def append(self, event: Event | str, **about: Any) -> None:
        """Write one event durably; `about` is for readers and is ignored on replay."""
        line = {**(line_of(event) if not isinstance(event, str) else {"event": event}), **about}
        fresh = not self.path.exists()
        with self.path.open("ab") as file:
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if fresh:
            sync_directory(self.path.parent)


KINDS = ("report", "failure", "ready_check")


def line_of(event: Event) -> dict[str, Any]:
    """An event as plain values; JSON has no NaN, so a score that is not finite is null."""
    if isinstance(event, ReadyCheck):
        return {"event": "ready_check"}
    if isinstance(event, Failure):
        return {"event": "failure", **vars(event)}
    return {"event": "report", **vars(event), "score": event.score if isfinite(event.score) else None}


def event_of(line: Mapping[str, Any]) -> Event:
    """The event that `line_of` wrote."""
    if line["event"] == "ready_check":
        return ReadyCheck()
    if line["event"] == "failure":
        return Failure(int(line["member"]), int(line["round"]), int(line["attempt"]), str(line["reason"]))
    score = nan if line["score"] is None else float(line["score"])
    kept = line.get("figures", {}), line.get("alerts", {})  # earlier versions kept none
    return Report(int(line["member"]), int(line["round"]), score, line["bundle"], *kept)
