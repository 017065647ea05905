"""Train, validation and test side by side, and beside the agent what needs no agent: a ridge regression, the market.

An agent that memorised earns on the bars it learned from what it does not earn on others. Parts are compared by the
Sharpe ratio of what holding the market does not explain, so that a market that rose in one part and fell in the other
is no memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt

from tailguard.env.dataset import Dataset
from tailguard.evaluation import measures
from tailguard.evaluation.backtest import Backtest, buy_and_hold, follow_targets
from tailguard.evaluation.ridge import fit_ridge

Array = npt.NDArray[np.float64]

AGENT, RIDGE, HOLD, EQUAL_WEIGHT = "agent", "ridge regression", "buy and hold", "equal weight"
TRAIN = "train"
KEPT = 0.5
"""Part of its training's Sharpe ratio that an agent has to keep on other bars, or it memorised."""
SURE = 2.326
"""Standard errors of 99 %, one-sided."""
REBALANCING_BAND = 0.1


@dataclass(frozen=True)
class PartResult:
    """What one strategy earned on one part of the bars, net of costs."""

    strategy: str
    part: str
    n_bars: int
    sharpe: float
    """Annualised, with its standard error."""
    sharpe_stderr: float
    bps_per_bar: float
    turnover_per_year: float
    excess: float
    """Sharpe ratio per bar of what holding the market does not explain, with its standard error."""
    excess_stderr: float


def part_result(strategy: str, part: str, result: Backtest, hold: Backtest) -> PartResult:
    """The figures of a backtest beside those of holding the market on the same bars."""
    rate = result.bars_per_year
    beta = measures.market_fit(result.returns, hold.returns, rate).beta
    rest = result.returns - beta * hold.returns
    rest = np.zeros_like(rest) if float(rest.std()) <= 1e-9 * float(result.returns.std()) else rest
    return PartResult(
        strategy=strategy,
        part=part,
        n_bars=len(result),
        sharpe=measures.sharpe(result.returns, rate),
        sharpe_stderr=sharpe_stderr(result.returns) * sqrt(rate),
        bps_per_bar=1e4 * float(result.returns.mean()),
        turnover_per_year=result.turnover_per_year,
        excess=measures.sharpe_per_bar(rest),
        excess_stderr=sharpe_stderr(rest),
    )


def sharpe_stderr(returns: Array) -> float:
    """Standard error of a Sharpe ratio per bar, for returns of this skew and kurtosis."""
    ratio, n = measures.sharpe_per_bar(returns), len(returns)
    spread = 1.0 - measures.skewness(returns) * ratio + (measures.kurtosis(returns) - 1.0) / 4.0 * ratio**2
    return sqrt(max(spread, 1e-12) / max(n - 1, 1))


def compare(data: Dataset, agent: Mapping[str, Backtest]) -> tuple[tuple[PartResult, ...], str]:
    """All strategies on the parts on which the agent was run, in this order; and the settings of the ridge regression.

    agent: backtests of the agent by the name of the part
    """
    ridge, costs, account = fit_ridge(data), data.config.costs, data.config.account
    found: dict[str, list[PartResult]] = {}
    for part, own in agent.items():
        first, n = own.first, len(own)
        hold = buy_and_hold(data.bars, first, n, costs=costs, account=account)
        results = {AGENT: own, RIDGE: ridge.run(first, first + n), HOLD: hold}
        if len(data.bars.symbols) > 1:
            results[EQUAL_WEIGHT] = equal_weight(data, first, n)
        for name, result in results.items():
            found.setdefault(name, []).append(part_result(name, part, result, hold))
    return tuple(result for results in found.values() for result in results), ridge.settings


def equal_weight(data: Dataset, first: int, n_steps: int) -> Backtest:
    """The same weight in every symbol that has been listed, put right where it is off by a tenth of itself."""
    listed = np.logical_or.accumulate(data.bars.tradable, axis=0)[first : first + n_steps]
    targets = listed / np.maximum(listed.sum(axis=1, keepdims=True), 1)
    band = REBALANCING_BAND / len(data.bars.symbols)
    rules = data.config.account.replace(gross_cap=1.0, no_trade_band=band, long_only=True)
    return follow_targets(data.bars, targets, first, costs=data.config.costs, account=rules)


def of_strategy(comparison: Sequence[PartResult], strategy: str) -> dict[str, PartResult]:
    """The results of a strategy by part."""
    return {result.part: result for result in comparison if result.strategy == strategy}


def memorised(train: PartResult, other: PartResult) -> bool:
    """Whether the agent earned on train, and kept less than half of it on other bars, both beyond noise (99 %).

    Both errors are asymptotically normal, so half of the one minus the other is too.
    """
    earned = train.excess > SURE * train.excess_stderr
    gap = KEPT * train.excess - other.excess
    return earned and gap > SURE * sqrt((KEPT * train.excess_stderr) ** 2 + other.excess_stderr**2)


def rule_is_enough(agent: PartResult, rule: PartResult) -> bool:
    """Whether a simple rule that earns something (95 %) has a Sharpe ratio no lower than the agent's."""
    return rule.sharpe > 1.645 * rule.sharpe_stderr and rule.sharpe >= agent.sharpe
