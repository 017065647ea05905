"""Significance against published worked examples, closed forms and simulation."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from numpy.testing import assert_allclose
from scipy.signal import lfilter

from tailguard.errors import ConfigError
from tailguard.evaluation import measures, significance


@pytest.mark.parametrize(("n_trials", "expected"), [(100, 0.9004), (46, 0.9505)])
def test_the_published_example_of_the_deflated_sharpe_ratio(n_trials, expected):
    """Sharpe 2.5 a year over 1,250 days of 250, skew -3, kurtosis 10, variance of the trials 0.5 a year."""
    found = significance.deflated_sharpe(
        2.5 / np.sqrt(250), 1_250, -3.0, 10.0, n_trials=n_trials, trial_variance_per_bar=0.5 / 250
    )
    assert_allclose(found, expected, atol=5e-5)


def test_one_trial_is_not_deflated_and_more_trials_deflate_more():
    one = significance.deflated_sharpe(0.05, 1_000, 0.0, 3.0, n_trials=1, trial_variance_per_bar=0.01)
    assert one == significance.probabilistic_sharpe(0.05, 1_000, 0.0, 3.0)
    many = [
        significance.deflated_sharpe(0.05, 1_000, 0.0, 3.0, n_trials=n, trial_variance_per_bar=1e-4)
        for n in (1, 2, 5, 20, 100)
    ]
    assert many == sorted(many, reverse=True)


def test_the_best_of_many_without_skill_is_as_large_as_expected():
    draws = np.random.default_rng(0).normal(0.0, 0.3, (20_000, 50))
    assert_allclose(significance.expected_best_sharpe(50, 0.09), draws.max(axis=1).mean(), rtol=0.02)


def test_the_probability_of_a_positive_sharpe_is_uniform_without_skill():
    draws = np.random.default_rng(1).normal(0.0, 0.01, (2_000, 500))
    found = [significance.probabilistic_sharpe(measures.sharpe_per_bar(r), 500, 0.0, 3.0) for r in draws]
    assert_allclose(np.quantile(found, [0.05, 0.5, 0.95]), [0.05, 0.5, 0.95], atol=0.025)


def test_the_shortest_track_record_is_where_the_probability_reaches_the_confidence():
    bars = significance.min_track_record_bars(0.05, -0.5, 6.0)
    assert_allclose(significance.probabilistic_sharpe(0.05, round(bars), -0.5, 6.0), 0.95, atol=1e-3)
    assert significance.min_track_record_bars(-0.01, 0.0, 3.0) == float("inf")


@pytest.mark.parametrize("rho", [0.3, 0.6])
def test_the_block_length_of_an_autoregression_is_its_closed_form(rho):
    """For AR(1): (2 rho / (1 - rho^2))^(2/3) * n^(1/3)."""
    n, rng = 20_000, np.random.default_rng(0)
    found = [significance.optimal_block_bars(lfilter([1.0], [1.0, -rho], rng.normal(size=n))) for _ in range(20)]
    assert_allclose(np.median(found), (2 * rho / (1 - rho**2)) ** (2 / 3) * n ** (1 / 3), rtol=0.15)


def test_independent_returns_need_short_blocks():
    assert significance.optimal_block_bars(np.random.default_rng(3).normal(size=5_000)) < 6.0
    assert significance.optimal_block_bars(np.zeros(100)) == 1.0


def test_a_resample_has_as_many_bars_as_the_series_in_blocks_of_the_mean_length():
    rng = np.random.default_rng(0)
    counts = []
    for _ in range(200):
        starts, lengths = significance._blocks(1_000, 10.0, rng)
        assert lengths.sum() == 1_000
        assert lengths.min() >= 1
        assert starts.max() < 1_000
        counts.append(len(lengths))
    assert_allclose(np.mean(counts), 100, rtol=0.05)


def test_moments_from_prefix_sums_are_those_of_the_resampled_series():
    rng = np.random.default_rng(5)
    r, b = rng.normal(0.001, 0.01, 300), rng.normal(0.0, 0.02, 300)
    found = significance.bootstrap_moments(r, b, n_resamples=20, block_bars=7.0, seed=11)
    again = np.random.default_rng(11)
    for i in range(20):
        starts, lengths = significance._blocks(300, 7.0, again)
        rows = np.concatenate([np.arange(s, s + n) % 300 for s, n in zip(starts, lengths, strict=True)])
        assert_allclose(found.mean[i], r[rows].mean(), atol=1e-14)
        assert_allclose(found.deviation[i], r[rows].std(ddof=1), rtol=1e-9)
        assert_allclose(found.alpha[i], measures.market_fit(r[rows], b[rows], 1.0).alpha_per_year, atol=1e-12)


def test_the_interval_covers_the_true_sharpe_ratio_as_often_as_it_says():
    """Over 200 draws 95 % is 190 +- 3 when the interval is exact; the percentile method falls a little short."""
    rng, covered = np.random.default_rng(7), 0
    for i in range(200):
        r = rng.normal(0.0005, 0.01, 300)
        moments = significance.bootstrap_moments(r, n_resamples=200, seed=i)
        interval = significance.sharpe_interval(moments, measures.sharpe(r, 252.0), 252.0)
        covered += interval.low <= 0.05 * np.sqrt(252) <= interval.high
    assert 178 <= covered <= 199


def test_autocorrelated_returns_widen_the_interval():
    rng = np.random.default_rng(2)
    shocks = rng.normal(0.0, 0.01, 5_000)
    widths = []
    for rho in (0.0, 0.6):
        r = lfilter([np.sqrt(1 - rho**2)], [1.0, -rho], shocks)
        interval = significance.sharpe_interval(significance.bootstrap_moments(r, n_resamples=500), 0.0, 252.0)
        widths.append(interval.high - interval.low)
    assert 1.6 < widths[1] / widths[0] < 2.6  # the standard error of the mean grows by (1 + rho) / sqrt(1 - rho^2) = 2


def test_returns_that_the_market_explains_leave_no_alpha():
    market = np.random.default_rng(4).normal(0.002, 0.01, 3_000)
    r = 0.7 * market + np.random.default_rng(5).normal(0.0, 0.002, 3_000)
    moments = significance.bootstrap_moments(r, market, n_resamples=500)
    assert significance.sharpe_interval(moments, measures.sharpe(r, 252.0), 252.0).low > 0.0
    alpha = significance.alpha_interval(moments, measures.market_fit(r, market, 252.0).alpha_per_year, 252.0)
    assert alpha.low < 0.0 < alpha.high


def slow_overfitting(table: np.ndarray, n_blocks: int) -> float:
    """The definition, half by half."""
    parts, lower = np.split(table, n_blocks), []
    for pick in combinations(range(n_blocks), n_blocks // 2):
        inside = np.concatenate([parts[i] for i in pick])
        outside = np.concatenate([parts[i] for i in range(n_blocks) if i not in pick])
        best = (inside.mean(0) / inside.std(0)).argmax()
        judged = outside.mean(0) / outside.std(0)
        rank = (judged < judged[best]).sum() + 1
        lower.append(rank / (table.shape[1] + 1) <= 0.5)
    return float(np.mean(lower))


def test_overfitting_is_computed_as_defined():
    table = np.random.default_rng(0).normal(0.0, 0.01, (320, 7))
    assert significance.backtest_overfitting(table, 8).probability == slow_overfitting(table, 8)


def test_overfitting_is_likely_without_skill_and_rare_with_it():
    rng = np.random.default_rng(3)
    luck = [significance.backtest_overfitting(rng.normal(0, 0.01, (640, 10)), 8).probability for _ in range(60)]
    assert 0.4 < np.mean(luck) < 0.62
    skilled = rng.normal(0.0, 0.01, (640, 10))
    skilled[:, 3] += 0.004
    assert significance.backtest_overfitting(skilled, 8).probability == 0.0


def test_odd_requests_are_refused():
    with pytest.raises(ConfigError, match="two trials or more"):
        significance.backtest_overfitting(np.zeros((100, 1)))
    with pytest.raises(ConfigError, match="must be even"):
        significance.backtest_overfitting(np.zeros((100, 3)), 7)
    with pytest.raises(ConfigError, match="benchmark on the same bars"):
        significance.bootstrap_moments(np.zeros(10), np.zeros(9))
