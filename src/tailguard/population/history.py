"""What a journal says about a population: who had which settings in which round, and whose copy the best is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
        )
        for line in lines
        if line["event"] == "report"
    ]


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
