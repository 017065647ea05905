"""Whether a population is well: what copies lose, whether scores still rise, and which alerts members raised."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from statistics import fmean
from typing import Any

from stable_baselines3.common.logger import Logger

from tailguard.health import metrics
from tailguard.health.alerts import ALERTS, Alert, AlertMonitor
from tailguard.health.population_alerts import POPULATION_ALERTS
from tailguard.population.scheduler import Report

WATCHED = (metrics.VALUE_LOSS.name, metrics.EXPLAINED_VARIANCE.name)
FEW = 3  # updates whose mean stands for a segment's begin or end
ALIKE = 1e-6  # scores that differ by a smaller share of their size are the same


class Vitals:
    """What the updates of one segment say: their first and last figures, and the alerts that began."""

    def __init__(self) -> None:
        self.n_updates = 0
        self.begin: list[dict[str, float]] = []
        self.end: deque[dict[str, float]] = deque(maxlen=FEW)
        self.alerts: dict[str, float] = {}

    def add(self, figures: Mapping[str, Any], begun: Iterable[Alert]) -> None:
        """One update."""
        self.n_updates += 1
        seen = {name: float(figures[name]) for name in WATCHED if name in figures}
        self.end.append(seen)
        if len(self.begin) < FEW:
            self.begin.append(seen)
        self.alerts |= {alert.name: float(figures[alert.metric.name]) for alert in begun}

    def last(self) -> dict[str, float]:
        """Means over the last few updates, as far as they are finite."""
        return means(self.end)

    def since_copy(self, source: Mapping[str, float]) -> dict[str, float]:
        """What changed between the source's last figures and the copy's first; nothing without a source.

        Nor with segments of one or two updates: a single update's explained variance is that of a handful of sequences.
        """
        if len(self.begin) < FEW:
            return {}
        first = means(self.begin)
        loss, explained = WATCHED
        found = {}
        if loss in first and source.get(loss, 0.0) > 0.0:
            found[metrics.EXPLOIT_VALUE_RATIO.name] = first[loss] / source[loss]
        if explained in first and explained in source:
            # below zero the critics explain nothing, whatever the figure
            lost = max(source[explained], 0.0) - max(first[explained], 0.0)
            found[metrics.EXPLOIT_EXPLAINED_VARIANCE_DROP.name] = lost
        return found


def means(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean of every figure over the rows that have it; those that are not finite are left out."""
    rows = list(rows)
    found = {name: [row[name] for row in rows if name in row] for name in WATCHED}
    return {name: fmean(values) for name, values in found.items() if values and isfinite(fmean(values))}


@dataclass(frozen=True)
class Notice:
    """An alert that began, of the population or of one member."""

    alert: Alert
    value: float
    since: int
    """The round in which it began, counted from 1 as in the table of members."""
    member: int | None = None

    def sentence(self) -> str:
        """What, since when, whose, and what to do."""
        whose = "" if self.member is None else f" of member {self.member}"
        return self.alert.sentence(self.value, f"round {self.since}{whose}")


@dataclass(frozen=True)
class Round:
    """A round that is over: its figures, and the alerts that began in it."""

    number: int
    """Counted from 1."""
    figures: Mapping[str, float]
    notices: tuple[Notice, ...]

    def row(self) -> dict[str, Any]:
        """As a line of metrics.jsonl; a round is a step there."""
        raised = {notice.alert.name: 1.0 for notice in self.notices}
        return {"step": self.number, **self.figures, **raised}

    def alert_lines(self) -> list[dict[str, Any]]:
        """As lines of alerts.jsonl."""
        return [
            {"step": self.number, "member": notice.member, **notice.alert.described(notice.value, notice.since)}
            for notice in self.notices
        ]


class Watch:
    """Follows the reports in the order of the journal; a round is over when one of the next is reported."""

    def __init__(self) -> None:
        self.monitor = AlertMonitor(POPULATION_ALERTS)
        self.known = {alert.name: alert for alert in ALERTS}
        self.reports: list[Report] = []
        self.round = 0
        self.best: float | None = None
        self.worst: float | None = None

    def follow(self, report: Report) -> Round | None:
        """Take in one report; returns the round that ends with it, if one does."""
        ended = None
        if report.round > self.round:
            ended, self.round = self.close(), report.round
        if report.round == self.round:  # who is late belongs to a round that is over
            self.reports.append(report)
        return ended

    def close(self) -> Round | None:
        """Judge the round as a whole; None when nobody reported in it."""
        if not self.reports:
            return None
        figures, number = self.figures(), self.round + 1
        self.monitor.check(figures, Logger(None, []))
        own = [
            Notice(self.known[name], value, number, report.member)
            for report in self.reports
            for name, value in report.alerts.items()
            if name in self.known
        ]
        common = [
            Notice(
                alert,
                figures[alert.metric.name],
                number - alert.for_updates + 1,
                self.member_with(alert.metric.name, figures[alert.metric.name]),
            )
            for alert in self.monitor.begun()
        ]
        self.reports = []
        return Round(number, figures, (*own, *common))

    def figures(self) -> dict[str, float]:
        """The figures of the reports of one round, by the names of `health.metrics`."""
        found: dict[str, float] = {}
        for name in (metrics.EXPLOIT_VALUE_RATIO.name, metrics.EXPLOIT_EXPLAINED_VARIANCE_DROP.name):
            values = [report.figures[name] for report in self.reports if name in report.figures]
            if values:
                found[name] = max(values)
        scores = [report.score for report in self.reports if isfinite(report.score)]
        if not scores:
            return found
        best, worst = max(scores), min(scores)
        found[metrics.BEST_SCORE.name] = best
        if len(scores) > 1:
            found[metrics.SCORE_SPREAD.name] = rise(worst, best)
            found[metrics.MEMBERS_ALIKE.name] = float(rise(worst, best) < ALIKE and not self.at_ceiling(best))
        if self.best is not None:
            found[metrics.BEST_SCORE_GAIN.name] = rise(self.best, best)
        self.best = best if self.best is None else max(self.best, best)
        self.worst = worst if self.worst is None else min(self.worst, worst)
        return found

    def at_ceiling(self, score: float) -> bool:
        """Whether a score stays the best so far and members once were worse: who shares it has arrived, not failed."""
        if self.best is None or self.worst is None:
            return False
        return abs(rise(self.best, score)) < ALIKE <= rise(self.worst, score)

    def member_with(self, name: str, value: float) -> int | None:
        """Whose figure it is that stands for the round, if it is somebody's own."""
        return next((report.member for report in self.reports if report.figures.get(name) == value), None)


def rise(before: float, after: float) -> float:
    """From one score to another, as a share of the larger size."""
    return (after - before) / max(abs(before), abs(after), 1e-12)
