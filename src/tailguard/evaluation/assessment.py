"""An assessment: everything a report shows about one agent on one stretch of bars, computed once and kept as files.

evaluation/NAME.parquet     bar by bar: returns, benchmark, stress, weights held and requested
evaluation/NAME.json        the rest
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
from polars.exceptions import PanicException, PolarsError

from tailguard.env import AccountRules, Costs, limits_of, requested_weights
from tailguard.env.no_trade import inside
from tailguard.errors import DataError
from tailguard.evaluation import measures
from tailguard.evaluation.backtest import (
    Backtest,
    Stress,
    break_even_bps,
    buy_and_hold,
    cost_stress,
    follow_targets,
    stamp_column,
)
from tailguard.evaluation.comparison import PartResult
from tailguard.evaluation.ledger import Trial, TrialCount
from tailguard.evaluation.significance import Interval, backtest_overfitting
from tailguard.evaluation.unseen_loss import unseen_loss
from tailguard.evaluation.verdict import Verdict, in_sample, judge
from tailguard.files import json_object, of_its_types, read_regular
from tailguard.losses.calibration import coverage
from tailguard.market import Bars

Array = npt.NDArray[np.float64]

FORMAT = 2
STAMPED_AT_CLOSES = 1
"""The format before: `ts` was the close of a bar, `decided` that of the one before it, targets were raw."""
LARGEST_RECORD = 2**26
UNREADABLE = (PolarsError, PanicException, OSError)
OVERFITTING_BLOCKS = 16


@dataclass(frozen=True)
class Subject:
    """What was examined."""

    run: str
    source: str
    """The files, or the embedded market."""
    data: str
    """Digest of the bars, or the name of the market: what makes two trials comparable."""
    split: str
    seed: int
    step: int
    config: str
    """Digest of the settings."""
    gamma: float = 1.0
    facts: tuple[tuple[str, str], ...] = ()
    """Further lines for the integrity section: (what, value)."""

    @property
    def in_sample(self) -> bool:
        """Whether the agent learned from these bars."""
        return self.split == "train"


@dataclass(frozen=True)
class Fold:
    """A stretch of the out-of-sample curve that one agent earned."""

    name: str
    first: int
    """Row of the backtest."""


@dataclass(frozen=True)
class Calibration:
    """Share of realised returns below each predicted quantile; equal to its level when the critics are right."""

    levels: tuple[float, ...]
    coverage: tuple[float, ...]
    n_predictions: int

    @property
    def worst(self) -> float:
        """Largest distance between a level and what came true."""
        return max(abs(a - b) for a, b in zip(self.levels, self.coverage, strict=True))


@dataclass(frozen=True)
class OptimumFound:
    """For a market whose best policy is known: what it earns on the same bars, per bar."""

    earned: float
    best_on_path: float
    best_expected: float
    fraction_stderr: float = 0.0
    """Standard error of `fraction`: on one path the agent may even be luckier than the best policy."""

    @property
    def fraction(self) -> float | None:
        return self.earned / self.best_on_path if self.best_on_path > 0.0 else None

    @classmethod
    def compare(cls, earned: Array, best: Array, best_expected: float, n_blocks: int = 50) -> OptimumFound:
        """From rewards per bar of the agent and of the best policy on the same bars."""
        mean, top = float(earned.mean()), float(best.mean())
        if not top > 0.0 or len(earned) < 2 * n_blocks:
            return cls(mean, top, best_expected)
        # delta method on blocks, which keep autocorrelation: the ratio varies like mean(earned - ratio * best) / top
        gap = earned - mean / top * best
        blocks = gap[: len(gap) // n_blocks * n_blocks].reshape(n_blocks, -1).mean(axis=1)
        return cls(mean, top, best_expected, float(blocks.std(ddof=1)) / n_blocks**0.5 / top)


@dataclass(frozen=True)
class Assessment:
    """One agent, one stretch of bars."""

    subject: Subject
    costs: Costs
    account: AccountRules
    strategy: Backtest
    hold: Backtest
    stress: tuple[Stress, ...]
    break_even_bps: float | None
    verdict: Verdict
    folds: tuple[Fold, ...] = ()
    overfitting: float | None = None
    """Probability of backtest overfitting among the trials on these bars; None with fewer than two."""
    calibration: Calibration | None = None
    optimum: OptimumFound | None = None
    comparison: tuple[PartResult, ...] = ()
    """The agent and simple rules on train, validation and these bars; empty where there is no training to compare."""
    checks: tuple[tuple[str, bool], ...] = field(default=())
    """Leak tests made on this very data: (what, held)."""

    def trial(self) -> Trial:
        """The row that this look adds to the ledger."""
        return trial_of(self.subject, self.strategy)


def trial_of(subject: Subject, strategy: Backtest, fold: int | None = None) -> Trial:
    return Trial(
        data=subject.data,
        split=subject.split,
        run=subject.run,
        seed=subject.seed,
        fold=fold,
        config=subject.config,
        step=subject.step,
        n_bars=len(strategy),
        sharpe_per_bar=measures.sharpe_per_bar(strategy.returns),
        returns=Trial.digest(strategy.returns),
    )


def assess(
    bars: Bars,
    strategy: Backtest,
    subject: Subject,
    trials: TrialCount,
    *,
    costs: Costs,
    account: AccountRules,
    folds: tuple[Fold, ...] = (),
    other_trials: Array | None = None,
    levels: Array | None = None,
    features: Callable[[Bars], npt.NDArray[Any]] | None = None,
    comparison: tuple[PartResult, ...] = (),
) -> Assessment:
    """Benchmarks, stress, verdict and checks of a finished backtest.

    other_trials: (T, K) returns of other trials on the same bars, for the probability of overfitting
    levels:       of `strategy.quantiles`
    features:     from bars to what the agent is shown, for the leak test
    comparison:   the agent and simple rules on train, validation and these bars
    """
    hold = buy_and_hold(bars, strategy.first, len(strategy), costs=costs, account=account)
    may_lose = unseen_loss(strategy.weights, bar_returns(bars, strategy))
    return Assessment(
        subject=subject,
        costs=costs,
        account=account,
        strategy=strategy,
        hold=hold,
        stress=cost_stress(bars, strategy, costs=costs, account=account),
        break_even_bps=break_even_bps(bars, strategy, account),
        verdict=verdict_on(subject, strategy, hold, trials, may_lose, comparison),
        folds=folds,
        overfitting=overfitting_among(strategy.returns, other_trials),
        calibration=calibrated(strategy, levels, subject.gamma, ~inside(bars.ts, account.no_trade_windows)),
        comparison=comparison,
        checks=leak_tests(bars, strategy, costs, account, features),
    )


def bar_returns(bars: Bars, strategy: Backtest) -> Array:
    """(T, A) from close to close up to the end of the backtest: what the symbols are known to do in one bar."""
    close = bars.close[: strategy.first + len(strategy) + 1]
    return close[1:] / close[:-1] - 1.0


def verdict_on(
    subject: Subject,
    strategy: Backtest,
    hold: Backtest,
    trials: TrialCount,
    may_lose: float | None = None,
    comparison: Sequence[PartResult] = (),
) -> Verdict:
    """The verdict, which is no on bars that were learned from; `may_lose` and `comparison` are those of `judge`."""
    verdict = judge(strategy, hold, trials, may_lose=may_lose, comparison=comparison)
    return in_sample(verdict) if subject.in_sample else verdict


def overfitting_among(returns: Array, others: Array | None) -> float | None:
    """Probability that picking the best of the trials picks luck; None where there is nothing to pick from."""
    if others is None or not others.shape[1] or len(returns) < 2 * OVERFITTING_BLOCKS:
        return None
    table = np.column_stack([returns, others])
    return backtest_overfitting(table, OVERFITTING_BLOCKS).probability if table.shape[1] > 1 else None


def calibrated(
    strategy: Backtest, levels: Array | None, gamma: float, orders_fill: npt.NDArray[np.bool_] | None = None
) -> Calibration | None:
    """Coverage of the quantiles predicted along the path by the discounted rewards that followed.

    orders_fill: (T,) bars at whose open orders are sent; of decisions for others no critic learns. None: all

    The last predictions are left out while their discounted future is not over (less than a thousandth of weight left).
    """
    if strategy.quantiles is None or levels is None or gamma >= 1.0:
        return None
    horizon = int(np.ceil(np.log(1e-3) / np.log(gamma))) if gamma > 0.0 else 1
    asked = np.flatnonzero(np.isfinite(strategy.quantiles[: max(len(strategy) - horizon, 0)]).all(axis=1))
    if orders_fill is not None:
        asked = asked[orders_fill[strategy.first + 1 + asked]]
    if len(asked) < 20:
        return None
    rewards = np.log(np.maximum(1.0 + strategy.returns, 1e-3))
    realised = np.zeros(len(rewards))
    total = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        total = rewards[t] + gamma * total
        realised[t] = total
    below = coverage(strategy.quantiles[asked], realised[asked])
    return Calibration(tuple(float(x) for x in levels), tuple(float(x) for x in below), len(asked))


def leak_tests(
    bars: Bars,
    strategy: Backtest,
    costs: Costs,
    account: AccountRules,
    features: Callable[[Bars], npt.NDArray[Any]] | None,
) -> tuple[tuple[str, bool], ...]:
    """Multiply every later price and volume by three and look whether anything earlier moved by one bit."""
    n = len(strategy) // 2
    cut = strategy.first + n
    rewritten = bars.scale_after(cut, 3.0)
    again = follow_targets(rewritten, strategy.targets, strategy.first, costs=costs, account=account)
    found = [("returns before a rewritten future are the same, bit for bit", _same(strategy.returns, again.returns, n))]
    if features is not None:
        before, after = features(bars), features(rewritten)
        found.insert(0, ("features before a rewritten future are the same, bit for bit", _same(before, after, cut + 1)))
    return tuple(found)


def _same(a: npt.NDArray[Any], b: npt.NDArray[Any], n: int) -> bool:
    return bool(np.array_equal(a[:n], b[:n], equal_nan=True))


# --- files


def save(assessment: Assessment, folder: Path, name: str) -> None:
    """Write both files."""
    folder.mkdir(parents=True, exist_ok=True)
    table(assessment).write_parquet(folder / f"{name}.parquet")
    (folder / f"{name}.json").write_text(json.dumps(scalars(assessment), indent=1), encoding="utf-8")


def table(assessment: Assessment) -> pl.DataFrame:
    """Bar by bar, with names a user can read elsewhere: `fill_at` is the `ts` of the bar that the row is about."""
    own = assessment.strategy
    columns: dict[str, Any] = {
        "decided_at": stamp_column(own.decided_at),
        "fill_at": stamp_column(own.fill_at),
        "return": own.returns,
        "cost": own.costs,
        "turnover": own.turnover,
        "hold_return": assessment.hold.returns,
        "hold_turnover": assessment.hold.turnover,
        "hold_cost": assessment.hold.costs,
    }
    columns |= {f"return:{stress.name}": stress.result.returns for stress in assessment.stress}
    columns |= {f"weight:{symbol}": own.weights[:, i] for i, symbol in enumerate(own.symbols)}
    columns |= {f"requested:{symbol}": own.requested[:, i] for i, symbol in enumerate(own.symbols)}
    columns |= {f"hold_weight:{symbol}": assessment.hold.weights[:, i] for i, symbol in enumerate(own.symbols)}
    return pl.DataFrame(columns)


def scalars(assessment: Assessment) -> dict[str, Any]:
    verdict = assessment.verdict
    return {
        "format": FORMAT,
        "subject": asdict(assessment.subject),
        "costs": assessment.costs.model_dump(mode="json"),
        "account": assessment.account.model_dump(mode="json"),
        "symbols": list(assessment.strategy.symbols),
        "bars_per_year": assessment.strategy.bars_per_year,
        "first": assessment.strategy.first,
        "stress": [[s.name, s.cost_multiple, s.delay_bars] for s in assessment.stress],
        "break_even_bps": assessment.break_even_bps,
        "verdict": {**asdict(verdict), "sharpe": list(verdict.sharpe), "alpha": list(verdict.alpha)},
        "folds": [[fold.name, fold.first] for fold in assessment.folds],
        "overfitting": assessment.overfitting,
        "calibration": asdict(assessment.calibration) if assessment.calibration else None,
        "optimum": asdict(assessment.optimum) if assessment.optimum else None,
        "comparison": [asdict(result) for result in assessment.comparison],
        "checks": [list(check) for check in assessment.checks],
    }


def stamps_of(column: pl.Series) -> npt.NDArray[np.datetime64]:
    """A zone-aware column as numpy stamps in UTC."""
    return column.dt.replace_time_zone(None).to_numpy().astype("datetime64[ms]")


def returns_by_bar(file: Path) -> tuple[npt.NDArray[np.datetime64], Array]:
    """The `ts` of the bars of an evaluation's parquet file, and the returns in them."""
    frame = in_todays_stamps(pl.read_parquet(file))
    return stamps_of(frame["fill_at"]), frame["return"].to_numpy()


def in_todays_stamps(frame: pl.DataFrame) -> pl.DataFrame:
    """An earlier version stamped rows at closes: one bar, the shortest time between two of them, after the open."""
    if "ts" not in frame.columns:
        return frame
    step = (pl.col("ts") - pl.col("decided")).min()
    return frame.with_columns(decided_at=pl.col("decided"), fill_at=pl.col("ts") - step).drop("decided", "ts")


def in_todays_format(frame: pl.DataFrame, symbols: tuple[str, ...], account: AccountRules) -> pl.DataFrame:
    """An earlier version kept what the policy had answered; what the account was asked to hold follows from it."""
    frame = in_todays_stamps(frame)
    if f"requested:{symbols[0]}" in frame.columns:
        return frame
    targets, weights = (
        frame.select([f"{kind}:{symbol}" for symbol in symbols]).to_numpy() for kind in ("target", "weight")
    )
    held = np.concatenate([np.zeros_like(weights[:1]), weights[:-1]])
    requested = requested_weights(targets, held, limits_of(account))
    return frame.with_columns(
        pl.Series(f"requested:{symbol}", requested[:, i]) for i, symbol in enumerate(symbols)
    ).drop([f"target:{symbol}" for symbol in symbols])


def load(folder: Path, name: str) -> Assessment:
    """Read what `save` wrote."""
    text, rows = folder / f"{name}.json", folder / f"{name}.parquet"
    if not (text.is_file() and rows.is_file()):
        raise DataError(f"There is no evaluation {name!r} in {folder}. Make one with `tailguard evaluate`.")
    said = json_object(read_regular(text, LARGEST_RECORD, DataError), str(text), DataError, or_nan=True)
    if said.get("format") not in (FORMAT, STAMPED_AT_CLOSES):
        raise DataError(f"{text} was written in format {said.get('format')!r}, this version reads {FORMAT}.")
    try:
        return assembled(said, pl.read_parquet(rows))
    except (*UNREADABLE, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError(
            f"{text} and {rows.name} are no evaluation: {type(error).__name__}: {str(error).splitlines()[0][:200]}. "
            "One of them is damaged or was edited; make them anew with `tailguard evaluate`."
        ) from None


def assembled(said: Mapping[str, Any], rows: pl.DataFrame) -> Assessment:
    """From what its two files hold."""
    symbols, account = tuple(said["symbols"]), AccountRules(**said["account"])
    frame = in_todays_format(rows, symbols, account)
    requested = frame.select([f"requested:{symbol}" for symbol in symbols]).to_numpy()
    own = Backtest(
        symbols=symbols,
        bars_per_year=float(said["bars_per_year"]),
        first=int(said["first"]),
        decided_at=stamps_of(frame["decided_at"]),
        fill_at=stamps_of(frame["fill_at"]),
        returns=frame["return"].to_numpy(),
        costs=frame["cost"].to_numpy(),
        turnover=frame["turnover"].to_numpy(),
        weights=frame.select([f"weight:{symbol}" for symbol in symbols]).to_numpy(),
        targets=requested,
        requested=requested,
    )
    hold = replace(
        own,
        returns=frame["hold_return"].to_numpy(),
        turnover=frame["hold_turnover"].to_numpy(),
        costs=frame["hold_cost"].to_numpy(),
        weights=frame.select([f"hold_weight:{symbol}" for symbol in symbols]).to_numpy(),
    )
    verdict = said["verdict"]
    calibration, optimum = said["calibration"], said["optimum"]
    return Assessment(
        subject=of_its_types(
            Subject(**{**said["subject"], "facts": tuple((str(a), str(b)) for a, b in said["subject"]["facts"])})
        ),
        costs=Costs(**said["costs"]),
        account=account,
        strategy=own,
        hold=hold,
        stress=tuple(
            Stress(kind, multiple, delay, replace(own, returns=frame[f"return:{kind}"].to_numpy()))
            for kind, multiple, delay in said["stress"]
        ),
        break_even_bps=said["break_even_bps"],
        verdict=of_its_types(
            Verdict(
                **{
                    **verdict,
                    "reasons": tuple(verdict["reasons"]),
                    "sharpe": Interval(*map(float, verdict["sharpe"])),
                    "alpha": Interval(*map(float, verdict["alpha"])),
                }
            )
        ),
        folds=tuple(Fold(kind, first) for kind, first in said["folds"]),
        overfitting=said["overfitting"],
        calibration=Calibration(
            tuple(calibration["levels"]), tuple(calibration["coverage"]), calibration["n_predictions"]
        )
        if calibration
        else None,
        optimum=of_its_types(OptimumFound(**optimum)) if optimum else None,
        comparison=tuple(of_its_types(PartResult(**result)) for result in said.get("comparison", [])),
        checks=tuple((what, bool(held)) for what, held in said["checks"]),
    )
