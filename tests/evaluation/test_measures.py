"""Measures against closed forms and against two independent packages."""

from __future__ import annotations

import empyrical
import ffn
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from tailguard.errors import ConfigError
from tailguard.evaluation import measures

SERIES = {
    "normal": np.random.default_rng(0).normal(5e-4, 0.01, 500),
    "fat": 0.01 * np.random.default_rng(1).standard_t(3, 1_000),
    "losing": np.random.default_rng(2).normal(-2e-3, 0.02, 260),
    "sparse": np.where(np.random.default_rng(3).random(800) < 0.8, 0.0, np.random.default_rng(4).normal(0, 0.02, 800)),
}
RATES = (252.0, 8_766.0)


@pytest.fixture(params=SERIES, ids=str)
def returns(request) -> np.ndarray:
    return SERIES[request.param]


@pytest.mark.parametrize("rate", RATES)
def test_annualised_measures_agree_with_empyrical(returns, rate):
    pairs = [
        (measures.annual_return(returns, rate), empyrical.annual_return(returns, annualization=rate)),
        (measures.annual_volatility(returns, rate), empyrical.annual_volatility(returns, annualization=rate)),
        (measures.sharpe(returns, rate), empyrical.sharpe_ratio(returns, annualization=rate)),
        (measures.sortino(returns, rate), empyrical.sortino_ratio(returns, annualization=rate)),
        (measures.downside_deviation(returns, rate), empyrical.downside_risk(returns, annualization=rate)),
        (measures.calmar(returns, rate), empyrical.calmar_ratio(returns, annualization=rate)),
    ]
    for ours, theirs in pairs:
        assert_allclose(ours, theirs, rtol=1e-9)


def test_the_other_measures_agree_with_empyrical(returns):
    assert_allclose(measures.total_return(returns), empyrical.cum_returns_final(returns), rtol=1e-9)
    assert_allclose(measures.max_drawdown(returns), empyrical.max_drawdown(returns), rtol=1e-9)
    assert_allclose(measures.value_at_risk(returns, 0.05), empyrical.value_at_risk(returns, 0.05), rtol=1e-12)
    # empyrical takes whole bars into the tail; n * alpha is whole for these lengths
    assert_allclose(measures.cvar(returns, 0.05), empyrical.conditional_value_at_risk(returns, 0.05), rtol=1e-12)


@pytest.mark.parametrize("rate", RATES)
def test_alpha_and_beta_agree_with_empyrical(returns, rate):
    benchmark = 0.4 * returns + np.random.default_rng(9).normal(1e-4, 0.01, len(returns))
    fit = measures.market_fit(returns, benchmark, rate)
    assert_allclose(fit.beta, empyrical.beta(returns, benchmark), rtol=1e-9)
    # empyrical compounds alpha over a year; ours is a rate
    compounded = (1.0 + fit.alpha_per_year / rate) ** rate - 1.0
    assert_allclose(compounded, empyrical.alpha(returns, benchmark, annualization=rate), rtol=1e-7)
    ours, theirs = measures.information_ratio(returns, benchmark, rate), empyrical.excess_sharpe(returns, benchmark)
    assert_allclose(ours / np.sqrt(rate), theirs, rtol=1e-9)


def test_measures_agree_with_ffn(returns):
    prices = pd.Series(
        100 * measures.equity_curve(returns), index=pd.date_range("2020-01-01", periods=len(returns) + 1)
    )
    series = pd.Series(returns)
    assert_allclose(measures.sharpe(returns, 252.0), ffn.calc_sharpe(series, nperiods=252), rtol=1e-9)
    assert_allclose(measures.max_drawdown(returns), ffn.calc_max_drawdown(prices), rtol=1e-9)
    assert_allclose(measures.drawdowns(returns), ffn.to_drawdown_series(prices).to_numpy(), atol=1e-12)
    assert_allclose(measures.total_return(returns), ffn.calc_total_return(prices), rtol=1e-9)
    assert_allclose(
        measures.information_ratio(returns, returns[::-1], 1.0),
        ffn.calc_information_ratio(series, pd.Series(returns[::-1])),
        rtol=1e-9,
    )
    # ffn's Sortino takes the deviation of the losses about their mean, with n - 1: another measure of the same name


@pytest.mark.filterwarnings("ignore::pandas.errors.Pandas4Warning")  # inside ffn
def test_months_agree_with_ffn_and_leave_holes_open():
    returns = SERIES["fat"]
    ts = np.datetime64("2021-11-15", "ms") + np.arange(len(returns)) * np.timedelta64(1, "D")
    found = measures.monthly_returns(returns, ts)
    prices = pd.Series(measures.equity_curve(returns)[1:], index=pd.DatetimeIndex(ts))
    theirs = ffn.PerformanceStats(prices).return_table
    assert theirs.index.to_list() == found.years
    known = np.isfinite(found.table)
    known[0, 10] = False  # ffn starts its first month at its first price
    assert_allclose(found.table[known], theirs.iloc[:, :12].to_numpy(dtype=float)[known], atol=1e-9)
    assert np.isnan(found.table[0, :10]).all()
    whole = np.nanprod(1.0 + found.table) - 1.0
    assert_allclose(whole, measures.total_return(returns), rtol=1e-9)


def test_cvar_takes_the_part_of_the_edge_bar_that_belongs_to_the_tail():
    assert_allclose(measures.cvar([-3.0, -1.0, 0.0, 2.0], 0.375), (-3.0 - 0.5) / 1.5)
    assert measures.cvar([-3.0, -1.0, 0.0, 2.0], 1.0) == -0.5


@settings(max_examples=50)
@given(st.lists(st.floats(-0.5, 0.5), min_size=2, max_size=60), st.floats(0.01, 1.0))
def test_the_tail_is_never_better_than_its_edge_or_the_mean(returns, alpha):
    assert measures.cvar(returns, alpha) <= np.mean(returns) + 1e-12
    assert measures.cvar(returns, alpha) >= min(returns) - 1e-12
    assert -1.0 <= measures.max_drawdown(returns) <= 0.0


def test_hand_made_series():
    returns = [0.1, -0.5, 0.2, 0.0, 1.0]
    assert_allclose(measures.total_return(returns), 1.1 * 0.5 * 1.2 * 2.0 - 1.0)
    assert_allclose(measures.max_drawdown(returns), -0.5)
    assert measures.longest_drawdown_bars(returns) == 3
    assert measures.win_rate(returns) == 0.75
    assert_allclose(measures.profit_factor(returns), 1.3 / 0.5)
    assert_allclose(measures.skewness([1.0, 2.0, 3.0]), 0.0, atol=1e-12)
    assert_allclose(measures.kurtosis([-1.0, 1.0]), 1.0)
    assert measures.holding_bars([[0.0], [1.0], [0.5], [-1.0], [0.0], [-0.2]]) == 4 / 3


def test_a_flat_account_has_no_ratio_and_no_risk():
    flat = np.zeros(50)
    for measure in (measures.sharpe, measures.sortino, measures.calmar, measures.annual_volatility):
        assert measure(flat, 252.0) == 0.0
    assert measures.max_drawdown(flat) == measures.win_rate(flat) == measures.profit_factor(flat) == 0.0
    assert measures.kurtosis(flat) == 3.0
    assert measures.sharpe(np.full(7, 0.013), 252.0) == 0.0  # rounding of a constant's mean is not volatility


def test_bad_input_says_what_is_wrong():
    with pytest.raises(ConfigError, match="vector of finite numbers"):
        measures.sharpe([0.1, np.nan], 252.0)
    with pytest.raises(ConfigError, match="must be positive"):
        measures.sharpe([0.1, 0.2], 0.0)
    with pytest.raises(ConfigError, match=r"alpha=0.0 must be in \(0, 1\]"):
        measures.cvar([0.1], 0.0)
    with pytest.raises(ConfigError, match="same bars of both"):
        measures.market_fit([0.1, 0.2], [0.1], 252.0)
