"""Figures that follow from those of many updates."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf, isfinite, log
from typing import Any

from tailguard.health import metrics


class Trends:
    """Figures that only a history gives: how far one has fallen from its best, how much one has jumped."""

    MEMORY = 0.8  # of the running average, per update

    def __init__(self) -> None:
        self.average: float | None = None
        self.best = -inf
        self.scale: float | None = None

    def follow(self, values: Mapping[str, float]) -> dict[str, float]:
        """Take in one update's figures; returns those that follow from the history."""
        found: dict[str, float] = {}
        ev, scale = values.get(metrics.EXPLAINED_VARIANCE.name), values.get(metrics.RETURN_STD.name)
        if ev is not None:
            ev = max(ev, -1.0)  # one wild update is not a trend
            self.average = ev if self.average is None else self.MEMORY * self.average + (1.0 - self.MEMORY) * ev
            self.best = max(self.best, self.average)
            found[metrics.EXPLAINED_VARIANCE_DROP.name] = self.best - self.average
        if scale is not None and scale > 0.0:
            if self.scale is not None:
                found[metrics.RETURN_SCALE_CHANGE.name] = abs(log(scale / self.scale))
            self.scale = scale
        return found

    def state_dict(self) -> dict[str, Any]:
        best = self.best if isfinite(self.best) else None
        return {"average": self.average, "best": best, "scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average, self.scale = state["average"], state["scale"]
        self.best = -inf if state["best"] is None else float(state["best"])
