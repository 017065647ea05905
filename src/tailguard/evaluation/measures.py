"""Measures of a series of returns: pure functions of numpy arrays, every annualised one told its bars per year.

`returns` are simple returns per bar, net of costs, shape (T,). Rates and deviations are fractions (0.05 is 5 %); losses
are negative. Nothing here guesses a calendar: `bars_per_year` is an argument, never a default.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tailguard.errors import ConfigError

Array = npt.NDArray[np.float64]


def equity_curve(returns: npt.ArrayLike, start: float = 1.0) -> Array:
    """(T + 1,) growth of `start`, its first entry."""
    path: Array = start * np.concatenate([[1.0], np.cumprod(1.0 + _series(returns))])
    return path


def total_return(returns: npt.ArrayLike) -> float:
    """Growth of the whole span, less 1."""
    return float(np.prod(1.0 + _series(returns)) - 1.0)


def annual_return(returns: npt.ArrayLike, bars_per_year: float) -> float:
    """The constant yearly rate that gives the same growth; -1 after ruin."""
    series = _series(returns)
    growth = float(np.prod(1.0 + series))
    years = len(series) / _rate(bars_per_year)
    return growth ** (1.0 / years) - 1.0 if growth > 0.0 and years > 0.0 else -1.0 if years > 0.0 else 0.0


def annual_volatility(returns: npt.ArrayLike, bars_per_year: float) -> float:
    """Standard deviation (n - 1) of a bar's return, times the square root of the bars per year."""
    return _deviation(_series(returns)) * sqrt(_rate(bars_per_year))


def sharpe_per_bar(returns: npt.ArrayLike) -> float:
    """Mean over standard deviation of a bar's return; 0 where nothing moves."""
    series = _series(returns)
    deviation = _deviation(series)
    return float(series.mean()) / deviation if deviation > 0.0 else 0.0


def sharpe(returns: npt.ArrayLike, bars_per_year: float) -> float:
    """Annualised Sharpe ratio against cash that earns nothing."""
    return sharpe_per_bar(returns) * sqrt(_rate(bars_per_year))


def downside_deviation(returns: npt.ArrayLike, bars_per_year: float) -> float:
    """Root mean square of the losing bars (the others count as 0), annualised."""
    losses = np.minimum(_series(returns), 0.0)
    return float(np.sqrt(np.mean(losses * losses))) * sqrt(_rate(bars_per_year)) if len(losses) else 0.0


def sortino(returns: npt.ArrayLike, bars_per_year: float) -> float:
    """Mean return per year over the downside deviation; 0 where nothing is lost and nothing earned."""
    series, downside = _series(returns), downside_deviation(returns, bars_per_year)
    if downside > 0.0:
        return float(series.mean()) * bars_per_year / downside
    return float("inf") if series.size and series.mean() > 0.0 else 0.0


def drawdowns(returns: npt.ArrayLike) -> Array:
    """(T + 1,) equity over its highest value so far, less 1: 0 at a high, negative below."""
    equity = equity_curve(returns)
    return equity / np.maximum.accumulate(equity) - 1.0


def max_drawdown(returns: npt.ArrayLike) -> float:
    """Deepest fall from a high, as a negative fraction."""
    return float(drawdowns(returns).min())


def longest_drawdown_bars(returns: npt.ArrayLike) -> int:
    """Bars from a high until the next new one, the longest such wait; one that has not ended counts."""
    under = drawdowns(returns) < 0.0
    longest = current = 0
    for below in under.tolist():
        current = current + 1 if below else 0
        longest = max(longest, current)
    return longest


def calmar(returns: npt.ArrayLike, bars_per_year: float) -> float:
    """Annual return over the size of the maximum drawdown; 0 where there was none."""
    deepest = max_drawdown(returns)
    return annual_return(returns, bars_per_year) / -deepest if deepest < 0.0 else 0.0


def value_at_risk(returns: npt.ArrayLike, alpha: float) -> float:
    """The alpha-quantile of a bar's return, linear between order statistics."""
    series = _series(returns)
    return float(np.quantile(series, _share(alpha))) if len(series) else 0.0


def cvar(returns: npt.ArrayLike, alpha: float) -> float:
    """Mean of the worst share alpha of bars; the bar at the edge counts with the part that belongs to the tail."""
    ordered = np.sort(_series(returns))
    if not len(ordered):
        return 0.0
    mass = np.clip(_share(alpha) * len(ordered) - np.arange(len(ordered)), 0.0, 1.0)
    return float(ordered @ mass / mass.sum())


def skewness(returns: npt.ArrayLike) -> float:
    """Third standardised moment; 0 for a constant."""
    return _standard_moment(_series(returns), 3, 0.0)


def kurtosis(returns: npt.ArrayLike) -> float:
    """Fourth standardised moment: 3 for a normal law (this is not the excess)."""
    return _standard_moment(_series(returns), 4, 3.0)


def win_rate(returns: npt.ArrayLike) -> float:
    """Share of bars with a gain among those with a gain or a loss."""
    series = _series(returns)
    moved = int(np.count_nonzero(series))
    return int((series > 0.0).sum()) / moved if moved else 0.0


def profit_factor(returns: npt.ArrayLike) -> float:
    """Sum of the gains over the sum of the losses."""
    series = _series(returns)
    gains, losses = float(series[series > 0.0].sum()), -float(series[series < 0.0].sum())
    return gains / losses if losses > 0.0 else float("inf") if gains > 0.0 else 0.0


class MarketFit(NamedTuple):
    """returns = alpha + beta * benchmark + rest, by least squares."""

    alpha_per_year: float
    beta: float


def market_fit(returns: npt.ArrayLike, benchmark: npt.ArrayLike, bars_per_year: float) -> MarketFit:
    """What holding the benchmark explains of the returns, and what is left per year."""
    series, other = _pair(returns, benchmark)
    variance = float(other.var())
    covariance = float(np.mean((series - series.mean()) * (other - other.mean())))
    beta = covariance / variance if variance > 0.0 else 0.0
    alpha = (float(series.mean()) - beta * float(other.mean())) * _rate(bars_per_year)
    return MarketFit(alpha, beta)


def information_ratio(returns: npt.ArrayLike, benchmark: npt.ArrayLike, bars_per_year: float) -> float:
    """Sharpe ratio of the difference to the benchmark, annualised."""
    series, other = _pair(returns, benchmark)
    return sharpe(series - other, bars_per_year)


def holding_bars(weights: npt.ArrayLike) -> float:
    """Mean length in bars of a stretch with one direction in one asset; weights (T, A), 0 when nothing is held."""
    direction = np.sign(np.asarray(weights, dtype=np.float64))
    if direction.ndim == 1:
        direction = direction[:, None]
    fresh = direction != 0.0
    begins = fresh.copy()
    begins[1:] &= direction[1:] != direction[:-1]
    n_stretches = int(begins.sum())
    return float(fresh.sum()) / n_stretches if n_stretches else 0.0


class MonthlyReturns(NamedTuple):
    """Growth less 1 of each calendar month; NaN where the series has no bar."""

    years: list[int]
    table: Array  # (years, 12)


def monthly_returns(returns: npt.ArrayLike, ts: npt.NDArray[np.datetime64]) -> MonthlyReturns:
    """Compound the bars of each month; `ts` (T,) are the bars' own stamps, their opens.

    By the instant of its close, a month's last bar would belong to the month after it.
    """
    series = _series(returns)
    if len(ts) != len(series):
        raise ConfigError(f"{len(ts)} stamps for {len(series)} returns.")
    if not len(series):
        return MonthlyReturns([], np.zeros((0, 12)))
    months = ts.astype("datetime64[M]").astype(np.int64)  # months since 1970-01
    first_year = 1970 + int(months[0]) // 12
    last_year = 1970 + int(months[-1]) // 12
    logs = np.full((last_year - first_year + 1, 12), np.nan)
    for month in np.unique(months):
        inside = months == month
        logs[1970 + int(month) // 12 - first_year, int(month) % 12] = np.prod(1.0 + series[inside]) - 1.0
    return MonthlyReturns(list(range(first_year, last_year + 1)), logs)


def _series(returns: npt.ArrayLike) -> Array:
    series = np.asarray(returns, dtype=np.float64)
    if series.ndim != 1 or not np.isfinite(series).all():
        raise ConfigError(f"returns must be a vector of finite numbers, not shape {series.shape} with NaN or infinity.")
    return series


def _pair(returns: npt.ArrayLike, benchmark: npt.ArrayLike) -> tuple[Array, Array]:
    series, other = _series(returns), _series(benchmark)
    if len(series) != len(other) or not len(series):
        raise ConfigError(f"{len(series)} returns and {len(other)} of the benchmark: give the same bars of both.")
    return series, other


def _deviation(series: Array) -> float:
    """With n - 1; exactly 0 for a constant, where rounding of the mean would leave dust."""
    return float(series.std(ddof=1)) if len(series) > 1 and np.ptp(series) > 0.0 else 0.0


def _standard_moment(series: Array, order: int, constant: float) -> float:
    if len(series) < 2 or not np.ptp(series) > 0.0:
        return constant
    z = (series - series.mean()) / series.std()
    return float(np.mean(z**order))


def _rate(bars_per_year: float) -> float:
    if not bars_per_year > 0.0:
        raise ConfigError(
            f"bars_per_year={bars_per_year} must be positive; Bars.bars_per_year counts it from the data."
        )
    return float(bars_per_year)


def _share(alpha: float) -> float:
    if not 0.0 < alpha <= 1.0:
        raise ConfigError(f"alpha={alpha} must be in (0, 1]; 0.05 is the worst 5 %.")
    return alpha
