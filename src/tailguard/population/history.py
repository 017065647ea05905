"""What a journal says about a population: who had which settings in which round, and whose copy the best is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tailguard.errors import CheckpointError
from tailguard.files import Fields, line_name
from tailguard.population.space import Value


@dataclass(frozen=True)
class Finished:
    """One segment as the journal tells it."""

    member: int
    round: int
    score: float | None
    hyperparameters: Mapping[str, Value]
    source: int | None
    """The member it began as a copy of, if it did."""
    seconds: float
    told: Mapping[str, Any] = field(default_factory=dict)
    """Steps, processor time, alerts and metrics of its last update."""


TOLD = ("step", "cpu_seconds", "train_cpu_seconds", "alerts", "metrics")


def history(lines: Iterable[Mapping[str, Any]]) -> list[Finished]:
    """The finished segments, in the order in which they were reported. lines: of a journal, from its first on"""
    return [finished(line, number) for number, line in enumerate(lines, 1) if line["event"] == "report"]


def finished(line: Mapping[str, Any], number: int) -> Finished:
    """A segment from its line."""
    fields = Fields(line, line_name("The journal", number), CheckpointError)
    settings, told = fields.mapping("hyperparameters"), {name: line[name] for name in TOLD if name in line}
    if not all(isinstance(value, bool | int | float | str) for value in settings.values()):
        raise fields.wrong("hyperparameters", "an object of numbers, words and switches")
    for name in told:
        if name == "step":
            fields.count(name)
        elif name in ("alerts", "metrics"):
            fields.numbers(name, or_null=True)
        else:
            fields.number(name)
    return Finished(
        fields.count("member"),
        fields.count("round"),
        fields.number_or_none("score"),
        settings,
        None if line.get("source") is None and "source" in line else fields.count("source"),
        fields.number("seconds"),
        told,
    )


def latest(segments: Iterable[Finished]) -> dict[int, Mapping[str, Any]]:
    """What every member told last."""
    return {segment.member: segment.told for segment in segments}


def ancestry(segments: Iterable[Finished], member: int) -> list[Finished]:
    """The segments that made a member what it is, first to last: through every copy back to the beginning."""
    by_member: dict[int, list[Finished]] = {}
    for segment in segments:
        by_member.setdefault(segment.member, []).append(segment)
    path: list[Finished] = []
    who, before = member, max((s.round for s in by_member.get(member, [])), default=-1) + 1
    while True:
        earlier = [segment for segment in by_member.get(who, []) if segment.round < before]
        if not earlier:
            return path[::-1]
        last = max(earlier, key=lambda segment: segment.round)
        path.append(last)
        who, before = (who if last.source is None else last.source), last.round
