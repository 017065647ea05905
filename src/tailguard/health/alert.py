"""What an alert is: a figure, when it is wrong, for how long, what it means and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from tailguard.health.metrics import TRUNK_NAMES, Metric


@dataclass(frozen=True)
class Rule:
    """When a figure is wrong: outside [low, high]."""

    low: float
    high: float

    def __call__(self, value: float) -> bool:
        return not self.low <= value <= self.high

    def __str__(self) -> str:
        if isfinite(self.low) and isfinite(self.high):
            return f"outside {self.low:g} to {self.high:g}"
        return f"below {self.low:g}" if isfinite(self.low) else f"above {self.high:g}"


def above(limit: float) -> Rule:
    return Rule(-inf, limit)


def below(limit: float) -> Rule:
    return Rule(limit, inf)


def outside(low: float, high: float) -> Rule:
    return Rule(low, high)


@dataclass(frozen=True)
class Alert:
    """Fires after `for_updates` updates in a row in which the rule held for the metric."""

    name: str
    metric: Metric
    fires: Rule
    meaning: str
    advice: str
    for_updates: int = 1

    @property
    def when(self) -> str:
        """The rule in words."""
        return str(self.fires)

    def sentence(self, value: float | None, since: str) -> str:
        """What, since when, and what to do, in one line."""
        figure = "unknown" if value is None else f"{value:.3g}"
        return f"{self.name}: {self.metric.name} = {figure}, since {since}. {self.meaning} {self.advice}"

    def described(self, value: float | None, since: int) -> dict[str, Any]:
        """As a line of alerts.jsonl."""
        return {
            "alert": self.name,
            "metric": self.metric.name,
            "value": value,
            "since": since,
            "meaning": self.meaning,
            "advice": self.advice,
        }


def per_trunk(
    name: str, of: Mapping[str, Metric], fires: Rule, meaning: str, advice: str, for_updates: int
) -> tuple[Alert, ...]:
    """One alert for each trunk; `{trunk}` and `{of}` stand for its name, as in metrics and in a sentence."""
    return tuple(
        Alert(name.format(trunk=trunk), metric, fires, meaning.format(of=TRUNK_NAMES[trunk]), advice, for_updates)
        for trunk, metric in of.items()
    )
