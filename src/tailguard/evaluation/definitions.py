"""What each figure of a report is: a name, a formula, a function and how it is written. The appendix shows the same."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import NamedTuple

from tailguard.evaluation import measures
from tailguard.evaluation.backtest import Backtest

ALPHA = 0.05


class Definition(NamedTuple):
    """A row of the table of measures and of the appendix."""

    name: str
    formula: str
    value: Callable[[Backtest], float]
    form: Callable[[float], str]


def percent(value: float, digits: int = 1) -> str:
    """'12.3%'; beyond a hundredfold, where percent says little, '250 fold'."""
    if not isfinite(value):
        return "n/a"
    return f"{value:.{digits}%}" if value < 100.0 else f"{value:,.0f} fold" if value < 1e6 else f"{value:.1e} fold"


def ratio(value: float) -> str:
    return f"{value:.2f}" if isfinite(value) else "n/a"


def fine_percent(value: float) -> str:
    return percent(value, 2)


def whole(value: float) -> str:
    return f"{value:,.0f}" if isfinite(value) else "n/a"


DEFINITIONS: tuple[Definition, ...] = (
    Definition("Total return", "∏(1 + r) - 1", lambda b: measures.total_return(b.returns), percent),
    Definition(
        "Annual return",
        "(∏(1 + r))^(bars per year / n) - 1",
        lambda b: measures.annual_return(b.returns, b.bars_per_year),
        percent,
    ),
    Definition(
        "Annual volatility",
        "s(r) · √(bars per year), s with n - 1",
        lambda b: measures.annual_volatility(b.returns, b.bars_per_year),
        percent,
    ),
    Definition(
        "Sharpe ratio",
        "mean(r) / s(r) · √(bars per year); cash earns nothing",
        lambda b: measures.sharpe(b.returns, b.bars_per_year),
        ratio,
    ),
    Definition(
        "Sortino ratio",
        "mean(r) · bars per year / (√mean(min(r, 0)²) · √(bars per year))",
        lambda b: measures.sortino(b.returns, b.bars_per_year),
        ratio,
    ),
    Definition(
        "Maximum drawdown",
        "min over t of E(t) / max of E before t - 1",
        lambda b: measures.max_drawdown(b.returns),
        percent,
    ),
    Definition(
        "Longest drawdown, bars",
        "longest wait from a high to the next one",
        lambda b: float(measures.longest_drawdown_bars(b.returns)),
        whole,
    ),
    Definition(
        "Calmar ratio",
        "annual return / |maximum drawdown|",
        lambda b: measures.calmar(b.returns, b.bars_per_year),
        ratio,
    ),
    Definition(
        "VaR 5 % of a bar", "5 % quantile of r", lambda b: measures.value_at_risk(b.returns, ALPHA), fine_percent
    ),
    Definition(
        "CVaR 5 % of a bar", "mean of the worst 5 % of r", lambda b: measures.cvar(b.returns, ALPHA), fine_percent
    ),
    Definition("Skewness", "mean(z³), z = (r - mean) / deviation", lambda b: measures.skewness(b.returns), ratio),
    Definition("Kurtosis", "mean(z⁴); 3 for a normal law", lambda b: measures.kurtosis(b.returns), ratio),
    Definition("Bars with a gain", "gains / (gains + losses)", lambda b: measures.win_rate(b.returns), percent),
    Definition("Profit factor", "sum of gains / sum of losses", lambda b: measures.profit_factor(b.returns), ratio),
    Definition(
        "Turnover per year", "mean(traded notional / equity) · bars per year", lambda b: b.turnover_per_year, ratio
    ),
    Definition("Costs per year", "mean(costs / equity) · bars per year", lambda b: costs_per_year(b), percent),
)

FURTHER = (
    (
        "95 % interval",
        "2.5 % and 97.5 % quantiles over 2,000 resamples of the stationary bootstrap; the mean block length follows "
        "the autocorrelation of the returns (Politis and White).",
    ),
    (
        "Deflated Sharpe ratio",
        "Φ((SR - SR*) √(n - 1) / √(1 - skew · SR + (kurtosis - 1)/4 · SR²)), per bar; SR* is the largest Sharpe ratio "
        "to expect from N trials without skill: √V · ((1 - g) Φ⁻¹(1 - 1/N) + g Φ⁻¹(1 - 1/(N e))), V the variance of "
        "the trials' Sharpe ratios, g = 0.5772 (Euler).",
    ),
    ("Alpha", "Intercept of the regression of r on the return of holding the market, times bars per year."),
    (
        "Probability of overfitting",
        "Share of all ways to halve the bars in which the trial that is best in one half falls to the lower half of "
        "the ranking in the other (CSCV, 16 blocks).",
    ),
    (
        "Break-even cost",
        "The fee per unit traded, in basis points and instead of all costs, at which the same decisions earn nothing.",
    ),
    (
        "Loss not met yet",
        "12 % of what is held, or the worst known bar at the weights held where that is more, L. A record of n bars "
        "stands it if mean(r) is at least the largest over k from 0 to 3 of k L/n + z s, where s is the standard error "
        "of mean(r) and z = Φ⁻¹(1 - 0.05 exp(k)): k losses are to be expected and the record met none.",
    ),
    (
        "Memorised",
        "a/2 - b above 2.33 standard errors, and a above 2.33 of its own: a and b are the Sharpe ratios per bar, on "
        "train and on these bars, of r - beta · return of the market; their errors are "
        "√((1 - skew · SR + (kurtosis - 1)/4 · SR²) / (n - 1)).",
    ),
    ("At equal volatility", "Holding the market with the share of equity that gives it the strategy's volatility."),
)


def costs_per_year(result: Backtest) -> float:
    return float(result.costs.mean()) * result.bars_per_year if len(result) else 0.0
