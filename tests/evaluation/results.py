"""Backtests and assessments with known answers, for the tests of verdict and report."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tailguard.env import AccountRules, Costs
from tailguard.evaluation.assessment import Assessment, OptimumFound, Subject, assess
from tailguard.evaluation.backtest import Backtest, follow_targets
from tailguard.evaluation.ledger import TrialCount
from tailguard.market import Bars

FEES = Costs(fee_bps=1, half_spread_bps=0, slippage_bps=0, impact=0, borrow_bps_per_year=0)
RULES = AccountRules()
ONE = TrialCount(1, 1, 0.0)


def market(n: int = 3_000, drift: float = 0.0, seed: int = 0, symbols: tuple[str, ...] = ("AAA",)) -> Bars:
    """Hourly bars of 1 % volatility; the open is the close before it."""
    rng = np.random.default_rng(seed)
    close = 100 * np.exp(np.cumsum(rng.normal(drift, 0.01, (n, len(symbols))), axis=0))
    open_ = np.vstack([np.full((1, len(symbols)), 100.0), close[:-1]])
    ts = np.datetime64("2022-01-01", "ms") + np.arange(n) * np.timedelta64(3_600_000, "ms")
    high, low = np.maximum(open_, close), np.minimum(open_, close)
    return Bars.from_arrays(ts, symbols, open_, high, low, close, np.full(close.shape, 1e9))


def foresight(bars: Bars, hit_rate: float, seed: int = 1, costs: Costs = FEES) -> Backtest:
    """Knows the direction of the next bar with this probability; 0.5 is a coin."""
    up = bars.close[11:-1] > bars.open[11:-1]
    right = np.random.default_rng(seed).random(up.shape) < hit_rate
    targets = np.where(up == right, 1.0, -1.0) / len(bars.symbols)
    return follow_targets(bars, targets, 10, costs=costs, account=RULES)


def assessed(
    bars: Bars, strategy: Backtest, trials: TrialCount = ONE, optimum: OptimumFound | None = None, **more
) -> Assessment:
    subject = Subject("first", "bars.csv", "abcdef", "test", 0, 1_000, "0123", gamma=0.9, facts=(("Splits", "tttTT"),))
    return replace(assess(bars, strategy, subject, trials, costs=FEES, account=RULES, **more), optimum=optimum)
