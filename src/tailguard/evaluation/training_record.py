"""What training left behind in a run's folder, as a report reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tailguard.errors import DataError
from tailguard.evaluation import measures
from tailguard.evaluation.attack_record import AttackRecord, read_record
from tailguard.files import Fields, line_name, read_json_lines

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RiskPromise:
    """A CVaR limit that training was given: mean of the worst `alpha` of the returns of a period, at least `limit`.

    Returns of a period are sums of rewards, ln(E[end] / E[start]).
    """

    limit: float
    alpha: float
    period_bars: int

    def kept(self, returns: Array) -> tuple[float, int]:
        """CVaR of the whole periods of a series of simple returns, and how many there are."""
        n = len(returns) // self.period_bars
        if n == 0:
            return float("nan"), 0
        logs = np.log(np.maximum(1.0 + returns[: n * self.period_bars], 1e-3)).reshape(n, -1).sum(axis=1)
        return measures.cvar(logs, self.alpha), n


@dataclass(frozen=True)
class TrainingRecord:
    """Metrics by update and alerts of a run, as its files hold them."""

    rows: tuple[Mapping[str, Any], ...] = ()
    alerts: tuple[Mapping[str, Any], ...] = ()
    promise: RiskPromise | None = None
    attacks: AttackRecord | None = None
    """What attacks on the trained agent left of it, where somebody tried."""

    @classmethod
    def read(cls, folder: Path, promise: RiskPromise | None = None) -> TrainingRecord:
        """From `metrics.jsonl`, `alerts.jsonl` and `attack.json`; what is not there is empty."""
        rows, alerts = (tuple(json_lines(folder / f"{name}.jsonl")) for name in ("metrics", "alerts"))
        return cls(rows, alerts, promise, read_record(folder))

    def series(self, name: str) -> tuple[Array, Array]:
        """Steps and values of a metric, where it was logged."""
        found = [(row["step"], row[name]) for row in self.rows if finite(row.get(name))]
        return np.array([x for x, _ in found], dtype=np.float64), np.array([y for _, y in found], dtype=np.float64)


def finite(value: object) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; a last line torn by a kill is left out, and any other damage is named."""
    for number, row in read_json_lines(path, DataError) if path.is_file() else ():
        Fields(row, line_name(path, number), DataError).count("step")
        yield row
