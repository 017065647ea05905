"""What a journal says about a population: who had which settings in which round, and whose copy the best is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

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
    """The finished segments, in the order in which they were reported."""
    return [
        Finished(
            int(line["member"]),
            int(line["round"]),
            line["score"],
            line["hyperparameters"],
            line["source"],
            float(line["seconds"]),
            {name: line[name] for name in TOLD if name in line},
        )
        for line in lines
        if line["event"] == "report"
    ]


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
