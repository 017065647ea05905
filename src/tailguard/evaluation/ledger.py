"""The trial ledger: every look at test is a row of `trials.jsonl`, and the count deflates what is claimed.

A row is a fact that happened, so the file only grows. Looking twice at the same result is one trial: what counts is how
many different results could have been picked from.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tailguard.errors import DataError
from tailguard.files import LARGEST_LINES, Fields, json_object, line_name, read_regular

FILE = "trials.jsonl"


@dataclass(frozen=True)
class Trial:
    """One result that somebody has seen."""

    data: str
    """Which bars were looked at: their digest, or the name of an embedded market."""
    split: str
    run: str
    seed: int
    fold: int | None
    """Of a walk-forward; None for a single split."""
    config: str
    """Digest of the settings."""
    step: int
    """Environment steps of the agent."""
    n_bars: int
    sharpe_per_bar: float
    returns: str
    """Digest of the returns: equal for two looks at the same result."""
    time: str = ""

    @staticmethod
    def digest(returns: npt.NDArray[np.float64]) -> str:
        """Of a series of returns."""
        return hashlib.sha256(np.ascontiguousarray(returns, dtype="<f8").tobytes()).hexdigest()[:16]


class TrialCount(NamedTuple):
    """What the deflated Sharpe ratio needs to know about the trials on the same data."""

    n_trials: int
    n_looks: int
    sharpe_variance_per_bar: float


def record(folder: Path, trial: Trial) -> None:
    """Append a row, durably."""
    stamped = {**asdict(trial), "time": trial.time or datetime.now(UTC).isoformat(timespec="seconds")}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(stamped) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> list[Trial]:
    """The rows of one run, oldest first; none where there is no ledger."""
    path = folder / FILE
    if not path.is_file():
        return []
    return [
        trial_in(line, line_name(path, number))
        for number, line in enumerate(read_regular(path, LARGEST_LINES, DataError).split(b"\n"), 1)
        if line.strip()
    ]


def trial_in(line: bytes, where: str) -> Trial:
    """A row from its line; the Sharpe ratio of returns that are all alike is NaN."""
    try:
        row = Fields({"time": "", **json_object(line, where, DataError, or_nan=True)}, where, DataError)
        for name in ("data", "split", "run", "config", "returns", "time"):
            row.text(name)
        for name in ("seed", "step", "n_bars"):
            row.count(name)
        row.count("fold") if row.values.get("fold") is not None else row.number_or_none("fold")
        row.number("sharpe_per_bar")
    except DataError as error:
        raise DataError(
            f"{where} is not a trial: {error} The ledger is append-only; restore the line, or remove it if it was cut "
            "off by a crash."
        ) from None
    return Trial(**{field.name: row.values[field.name] for field in fields(Trial)})


def gather(runs: Path, data: str, split: str) -> list[Trial]:
    """Rows of every run beside each other that looked at this split of this data."""
    found = (trial for path in sorted(runs.glob(f"*/{FILE}")) for trial in read(path.parent))
    return [trial for trial in found if trial.data == data and trial.split == split]


def count(trials: Iterable[Trial]) -> TrialCount:
    """Distinct results, and how much their Sharpe ratios differ."""
    rows = list(trials)
    distinct = {trial.returns: trial.sharpe_per_bar for trial in rows}
    sharpes = np.array(list(distinct.values()))
    variance = float(sharpes.var(ddof=1)) if len(sharpes) > 1 else 0.0
    return TrialCount(len(distinct), len(rows), variance)
