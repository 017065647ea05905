"""Replaying a journal into a scheduler, line by line, with every line compared with what the ones before it lead to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailguard.errors import CheckpointError
from tailguard.files import line_name
from tailguard.population.journal import KINDS, event_of
from tailguard.population.scheduler import Command, Event, PBTScheduler, ReadyCheck, Report
from tailguard.population.segment import bundle_name, recorded_score


def replayed(
    scheduler: PBTScheduler, lines: Sequence[Mapping[str, Any]], journal: Path
) -> tuple[list[Command], list[Event]]:
    """The segments that a journal leaves under way, and its events. A journal that cannot have come about so is refused
    with the line: it, the configuration or a bundle was changed."""
    commands, events = scheduler.start(), []
    for number, line in enumerate(lines, 1):
        if line["event"] not in KINDS:
            continue
        event = event_of(line)
        problem = contradiction(scheduler, line, event, journal.parent)
        if problem is not None:
            raise CheckpointError(
                f"{line_name(journal, number)}: {problem}. The journal, config.yaml or a bundle was changed: put a "
                "copy back, or start the population anew under another --run."
            )
        events.append(event)
        scheduler.handle(event)
    return (scheduler.under_way() if lines else commands), events


def contradiction(scheduler: PBTScheduler, line: Mapping[str, Any], event: Event, folder: Path) -> str | None:
    """What a line says that cannot be, given the lines before it."""
    if isinstance(event, ReadyCheck):
        return None
    if event.member >= len(scheduler.members):
        return f"member is {event.member}, and the last of the population is {len(scheduler.members) - 1}"
    if event.round >= scheduler.n_rounds:
        return f"round is {event.round}, and the last one is {scheduler.n_rounds - 1}"
    if not isinstance(event, Report):
        return None
    if event.bundle is not None and event.bundle != bundle_name(event.member, event.round):
        return f"bundle is {event.bundle[:60]!r}, and this segment writes {bundle_name(event.member, event.round)!r}"
    if event.bundle is None and line["score"] is not None:
        return f"bundle is null beside the score {line['score']!r}, and only a segment that diverged writes none"
    member = scheduler.members[event.member]
    if member.running != event.round or scheduler.finished:
        return None  # a straggler that nobody waited for any more
    expected = json.loads(json.dumps(dict(member.hyperparameters)))
    for name in sorted({*expected, *line.get("hyperparameters", expected)}):
        said = line.get("hyperparameters", expected).get(name)
        if said != expected.get(name):
            return f"hyperparameters has {name}={said!r}, and the lines before it give {expected.get(name)!r}"
    score = recorded_score(folder, event.bundle) if event.bundle is not None else None
    if score is not None and score != line["score"]:
        return f"score is {line['score']!r}, and the segment's own record says {score!r}"
    return None
