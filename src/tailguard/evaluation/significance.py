"""Is it skill? Intervals by the stationary bootstrap, the Sharpe ratio deflated by trials, and backtest overfitting.

Sharpe ratios inside the formulas are per bar; names say so. Published sources: the stationary bootstrap (Politis and
Romano 1994) with the block length of Politis and White (2004, corrected 2009); the probabilistic and the deflated
Sharpe ratio (Bailey and López de Prado 2012, 2014); combinatorially symmetric cross-validation (Bailey et al. 2015).
"""

from __future__ import annotations

from itertools import combinations
from math import e, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tailguard.errors import ConfigError
from tailguard.losses.normal import normal_cdf, normal_quantile

Array = npt.NDArray[np.float64]

EULER = 0.5772156649015329
MOST_BLOCKS = 1_000


class Interval(NamedTuple):
    """An estimate between its bootstrap quantiles."""

    low: float
    estimate: float
    high: float


class BootstrapMoments(NamedTuple):
    """Of each resample of (returns, benchmark): means, deviations and the slope, all (R,) per bar."""

    mean: Array
    deviation: Array
    alpha: Array  # what the benchmark does not explain


# --- resampling


def optimal_block_bars(series: npt.ArrayLike) -> float:
    """Mean block length of the stationary bootstrap that estimates the variance of a mean best, in bars.

    The autocovariances are summed up to twice the lag from which they stay within their noise.
    """
    x = np.asarray(series, dtype=np.float64)
    n = len(x)
    if n < 8 or not np.ptp(x) > 0.0:
        return 1.0
    quiet_lags = max(5, int(sqrt(np.log10(n))))
    limit = int(np.ceil(sqrt(n))) + quiet_lags
    largest = min(int(np.ceil(min(3 * sqrt(n), n / 3))), n - 1)
    limit = min(limit, n - 1)
    centred = x - x.mean()
    covariance = np.array([float(centred[lag:] @ centred[: n - lag]) / n for lag in range(limit + 1)])
    noise = 2.0 * sqrt(np.log10(n) / n)
    small = np.abs(covariance[1:] / covariance[0]) < noise
    cut = limit
    for lag in range(limit - quiet_lags + 1):
        if small[lag : lag + quiet_lags].all():
            cut = lag
            break
    width = min(2 * max(cut, 1), limit)
    lags = np.arange(-width, width + 1)
    taper = np.clip(2.0 * (1.0 - np.abs(lags) / width), 0.0, 1.0)
    weighted = taper * covariance[np.abs(lags)]
    slope, level = float(np.abs(lags) @ weighted), float(weighted.sum())
    if level <= 0.0:
        return 1.0
    block = (slope * slope / (level * level) * n) ** (1.0 / 3.0)
    return float(np.clip(block, 1.0, largest))


def bootstrap_moments(
    returns: npt.ArrayLike,
    benchmark: npt.ArrayLike | None = None,
    *,
    n_resamples: int = 2_000,
    block_bars: float | None = None,
    seed: int = 0,
) -> BootstrapMoments:
    """Moments over resamples made of blocks of geometric length, wrapped around the end.

    A block enters only through its sums, which two prefix sums give, so a resample costs as many operations as it has
    blocks, not bars. Unless `block_bars` says otherwise there are about a thousand of them at most: longer blocks than
    needed are harmless while there are many.
    """
    r = np.asarray(returns, dtype=np.float64)
    b = np.zeros_like(r) if benchmark is None else np.asarray(benchmark, dtype=np.float64)
    n = len(r)
    if n < 2 or len(b) != n:
        raise ConfigError(f"A bootstrap needs two bars or more and a benchmark on the same bars: {n} and {len(b)}.")
    block = max(optimal_block_bars(r), n / MOST_BLOCKS) if block_bars is None else float(block_bars)
    rng = np.random.default_rng(seed)
    columns = np.stack([r, r * r, b, b * b, r * b])
    prefix = np.concatenate([np.zeros((5, 1)), np.cumsum(np.concatenate([columns, columns], axis=1), axis=1)], axis=1)
    sums = np.empty((n_resamples, 5))
    for i in range(n_resamples):
        starts, lengths = _blocks(n, block, rng)
        sums[i] = (prefix[:, starts + lengths] - prefix[:, starts]).sum(axis=1)
    mean, square, other, other_square, product = sums.T / n
    variance = np.maximum(square - mean * mean, 0.0)
    other_variance = np.maximum(other_square - other * other, 0.0)
    covariance = product - mean * other
    beta = np.divide(covariance, other_variance, out=np.zeros(n_resamples), where=other_variance > 0.0)
    return BootstrapMoments(mean, np.sqrt(variance * n / (n - 1)), mean - beta * other)


def _blocks(n: int, block: float, rng: np.random.Generator) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Starts and lengths of blocks that together have n bars."""
    lengths = np.zeros(0, dtype=np.int64)
    while lengths.sum() < n:
        lengths = np.concatenate([lengths, rng.geometric(1.0 / block, size=int(n / block) + 16)])
    ends = np.cumsum(lengths)
    n_blocks = int(np.searchsorted(ends, n)) + 1
    lengths = np.minimum(lengths[:n_blocks], n)
    lengths[-1] = n - (ends[n_blocks - 2] if n_blocks > 1 else 0)
    return rng.integers(0, n, size=n_blocks), lengths


def sharpe_interval(moments: BootstrapMoments, estimate: float, bars_per_year: float, level: float = 0.95) -> Interval:
    """Percentile interval of the annualised Sharpe ratio."""
    ratio = np.divide(
        moments.mean, moments.deviation, out=np.zeros_like(moments.mean), where=moments.deviation > 0.0
    ) * sqrt(bars_per_year)
    return _percentiles(ratio, estimate, level)


def alpha_interval(moments: BootstrapMoments, estimate: float, bars_per_year: float, level: float = 0.95) -> Interval:
    """Percentile interval of the yearly return that the benchmark does not explain."""
    return _percentiles(moments.alpha * bars_per_year, estimate, level)


def _percentiles(draws: Array, estimate: float, level: float) -> Interval:
    low, high = np.quantile(draws, [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return Interval(float(low), estimate, float(high))


# --- the Sharpe ratio beside what luck and repeated trying give


def probabilistic_sharpe(
    sharpe_per_bar: float, n_bars: int, skew: float, kurtosis: float, against_per_bar: float = 0.0
) -> float:
    """Probability that the true Sharpe ratio exceeds `against_per_bar`, for returns of this skew and kurtosis."""
    if n_bars < 2:
        return 0.5
    spread = 1.0 - skew * sharpe_per_bar + (kurtosis - 1.0) / 4.0 * sharpe_per_bar**2
    return float(normal_cdf((sharpe_per_bar - against_per_bar) * sqrt(n_bars - 1) / sqrt(max(spread, 1e-12))))


def expected_best_sharpe(n_trials: float, trial_variance: float) -> float:
    """Largest Sharpe ratio to expect among n_trials without skill; the unit is that of the root of the variance."""
    if n_trials <= 1.0:
        return 0.0
    highest = (1.0 - EULER) * normal_quantile(1.0 - 1.0 / n_trials) + EULER * normal_quantile(
        1.0 - 1.0 / (n_trials * e)
    )
    return float(sqrt(trial_variance) * highest)


def deflated_sharpe(
    sharpe_per_bar: float,
    n_bars: int,
    skew: float,
    kurtosis: float,
    *,
    n_trials: float,
    trial_variance_per_bar: float,
) -> float:
    """Probability that the true Sharpe ratio is above 0, given that it is the best of n_trials.

    trial_variance_per_bar: variance over the trials of their Sharpe ratios per bar
    """
    best = expected_best_sharpe(n_trials, trial_variance_per_bar)
    return probabilistic_sharpe(sharpe_per_bar, n_bars, skew, kurtosis, best)


def min_track_record_bars(sharpe_per_bar: float, skew: float, kurtosis: float, confidence: float = 0.95) -> float:
    """Bars after which a Sharpe ratio of this size is above 0 with `confidence`; infinite when it is not positive."""
    if sharpe_per_bar <= 0.0:
        return float("inf")
    spread = 1.0 - skew * sharpe_per_bar + (kurtosis - 1.0) / 4.0 * sharpe_per_bar**2
    return 1.0 + spread * float(normal_quantile(confidence) / sharpe_per_bar) ** 2


# --- choosing among trials


class Overfitting(NamedTuple):
    """What the choice of the best trial in one half of the data is worth in the other half."""

    probability: float
    """Share of the ways to halve the data in which the best trial falls to the lower half of the ranking."""
    logits: Array
    """(combinations,) log odds of the chosen trial's rank out of sample."""


def backtest_overfitting(returns: npt.ArrayLike, n_blocks: int = 16) -> Overfitting:
    """Probability of backtest overfitting by combinatorially symmetric cross-validation.

    returns: (T, K) per bar, one column per trial, all on the same bars
    """
    table = np.asarray(returns, dtype=np.float64)
    if table.ndim != 2 or table.shape[1] < 2:
        raise ConfigError(f"returns has shape {table.shape}; comparing trials needs (T, K) with two trials or more.")
    if n_blocks % 2 or n_blocks < 2 or len(table) < 2 * n_blocks:
        raise ConfigError(f"n_blocks={n_blocks} must be even and leave two bars or more each of {len(table)} bars.")
    size = len(table) // n_blocks
    blocks = table[len(table) - size * n_blocks :].reshape(n_blocks, size, -1)
    sums, squares = blocks.sum(axis=1), np.square(blocks).sum(axis=1)  # (blocks, K): a half is a sum of them
    n_half, half = size * n_blocks // 2, n_blocks // 2
    chosen = np.array([[block in pick for block in range(n_blocks)] for pick in combinations(range(n_blocks), half)])
    inside = _sharpes(chosen @ sums, chosen @ squares, n_half)
    outside = _sharpes(~chosen @ sums, ~chosen @ squares, n_half)
    winner = inside.argmax(axis=1)
    won = outside[np.arange(len(winner)), winner][:, None]
    below = (outside < won).sum(axis=1) + 0.5 * ((outside == won).sum(axis=1) - 1)  # ties share their ranks
    rank = (below + 1.0) / (table.shape[1] + 1.0)
    logits = np.log(rank / (1.0 - rank))
    return Overfitting(float(np.mean(logits <= 0.0)), logits)


def _sharpes(total: Array, square: Array, n: int) -> Array:
    mean = total / n
    deviation = np.sqrt(np.maximum(square / n - mean * mean, 0.0))
    return np.divide(mean, deviation, out=np.zeros_like(mean), where=deviation > 0.0)
