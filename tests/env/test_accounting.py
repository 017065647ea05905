"""Money is tested by what it conserves, and the native kernel by the numpy that defines it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from random_markets import random_bars

from tailguard.env import AccountRules, Costs, kernel
from tailguard.env.accounting import (
    Account,
    advance,
    carry,
    equity,
    fill,
    limits_of,
    new_account,
    target_weights,
)
from tailguard.env.costs import FREE, CostRates, cost_rates
from tailguard.env.tape import tape_of
from tailguard.errors import ConfigError
from tailguard.kernels import native

rates = st.builds(
    CostRates,
    fee=st.floats(0, 0.01),
    adverse=st.floats(0, 0.01),
    impact=st.floats(0, 1.0),
    funding=st.floats(0, 0.001),
    borrow=st.floats(0, 0.001),
)
rules = st.builds(
    AccountRules,
    long_only=st.booleans(),
    gross_cap=st.floats(0.2, 3.0),
    no_trade_band=st.sampled_from([0.0, 0.01, 0.1]),
)


def some_account(rng: np.random.Generator, n: int, a: int) -> Account:
    return Account(rng.uniform(1e4, 1e6, n), rng.normal(0, 50, (n, a)), rng.uniform(50, 150, (n, a)))


@given(seed=st.integers(0, 2**32), rates=rates, n_assets=st.integers(1, 12))
@settings(deadline=None)
def test_a_trade_changes_equity_only_by_its_cost(seed, rates, n_assets):
    rng = np.random.default_rng(seed)
    account = some_account(rng, 5, n_assets)
    traded, price = rng.normal(0, 20, (5, n_assets)), rng.uniform(1, 1e3, (5, n_assets))
    sigma, bar_value = rng.uniform(0, 0.05, (5, n_assets)), rng.uniform(0, 1e6, (5, n_assets))
    after, costs, fees = fill(account, traded, price, sigma, bar_value, rates)
    assert_allclose(equity(after, price), equity(account, price) - costs, rtol=1e-9, atol=1e-6)
    assert (costs >= fees).all()
    assert (fees >= 0).all()


@given(seed=st.integers(0, 2**32), rates=rates)
@settings(deadline=None)
def test_holding_costs_are_never_received(seed, rates):
    rng = np.random.default_rng(seed)
    account = some_account(rng, 5, 3)._replace(cash=rng.normal(0, 1e5, 5))
    price = rng.uniform(1, 1e3, (5, 3))
    after, cost = carry(account, price, rates)
    assert (cost >= 0).all()
    assert_allclose(equity(after, price), equity(account, price) - cost, rtol=1e-9, atol=1e-6)


@given(seed=st.integers(0, 2**32), rates=rates, rules=rules, n_assets=st.integers(1, 10))
@settings(deadline=None, max_examples=40)
def test_equity_moves_by_price_changes_and_costs_only(seed, rates, rules, n_assets):
    """E[t+1] - E[t] = old units * (open - close) + new units * (close' - open) - costs, every bar, every account."""
    bars = random_bars(30, n_assets, seed % 1000, missing=0.2)
    tape, limits = tape_of(bars, Costs(impact_window=5)), limits_of(rules)
    rng = np.random.default_rng(seed)
    account = new_account(rules.initial_cash, 4, n_assets)
    for t in range(29):
        prices = tape.at(np.full(4, t))
        before, held = equity(account, prices.mark), account.units
        account, bill = advance(account, rng.uniform(-1, 1, (4, n_assets)), prices, rates, limits)
        at_open = np.where(prices.fillable, prices.open, prices.mark)
        gain = (held * (at_open - prices.mark) + account.units * (prices.next_mark - at_open)).sum(axis=1)
        assert_allclose(equity(account, prices.next_mark), before + gain - bill.costs, rtol=1e-9)
        assert_array_equal((account.units != held) & ~prices.fillable, False)


def with_and_without_the_core(compute):
    """What `compute` returns with the native core (where it was built), and by the numpy that defines it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "native", lambda: None)
        expected = compute()
    return compute(), expected


@given(seed=st.integers(0, 2**32), rates=rates, rules=rules, n_assets=st.integers(1, 10), n_envs=st.integers(1, 6))
@settings(deadline=None, max_examples=60)
def test_the_native_accounting_equals_numpy_bit_for_bit(seed, rates, rules, n_assets, n_envs):
    tape, limits = (
        tape_of(random_bars(40, n_assets, seed % 1000, missing=0.2), Costs(impact_window=5)),
        limits_of(rules),
    )
    rows = np.random.default_rng(seed).normal(size=(40, 2 * n_assets)).astype(np.float32)
    columns = np.array([2 * n_assets, -1, 3 * n_assets, 3 * n_assets + 1])

    def trade():
        rng, seen = np.random.default_rng(seed), []
        accounts = kernel.new_accounts(rules.initial_cash, n_envs, n_assets)
        accounts.t[:] = rng.integers(0, 20, n_envs)
        for _ in range(19):
            action = rng.uniform(-1.5, 1.5, (n_envs, n_assets)) * rng.integers(0, 2, (n_envs, 1))
            seen += kernel.close_bar(accounts, action, tape, rates, limits, 12, 0.5 * rules.initial_cash)
            seen += [part.copy() for part in accounts]
            seen.append(kernel.observe(accounts, rows, tape.mark, 12, columns, 3 * n_assets + 2))
        return seen

    for found, expected in zip(*with_and_without_the_core(trade), strict=True):
        assert_array_equal(found, expected)


@given(seed=st.integers(0, 2**32), rates=rates, rules=rules, n_assets=st.integers(1, 4))
@settings(deadline=None, max_examples=30)
def test_following_targets_natively_equals_numpy_bit_for_bit(seed, rates, rules, n_assets):
    tape, rng = (
        tape_of(random_bars(40, n_assets, seed % 1000, missing=0.2), Costs(impact_window=5)),
        np.random.default_rng(seed),
    )
    targets, limits = rng.uniform(-1, 1, (30, n_assets)), limits_of(rules)._replace(ruin=0.9 * rules.initial_cash)
    run = lambda: kernel.follow(9, targets, rules.initial_cash, tape, rates, limits)  # noqa: E731
    for found, expected in zip(*with_and_without_the_core(run), strict=True):
        assert_array_equal(found, expected)


@pytest.mark.skipif(native() is None, reason="needs the native core")
def test_the_native_accounting_refuses_what_would_read_beyond_its_arrays():
    tape, limits = tape_of(random_bars(10, 2), Costs(impact_window=5)), limits_of(AccountRules())
    accounts, action = kernel.new_accounts(1e5, 3, 2), np.zeros((3, 2))
    step = lambda accounts, action: kernel.close_bar(accounts, action, tape, FREE, limits, 5, 1.0)  # noqa: E731
    with pytest.raises(ValueError, match="another shape"):
        step(accounts, action[:2])
    with pytest.raises(TypeError, match="another type"):
        step(accounts, action.astype(np.float32))
    with pytest.raises(ValueError, match="contiguous"):
        step(accounts, np.zeros((2, 3)).T)
    with pytest.raises(IndexError, match="does not have"):
        step(accounts._replace(t=np.array([0, 9, 0])), action)
    with pytest.raises(IndexError, match="does not have"):
        kernel.follow(5, np.zeros((5, 2)), 1e5, tape, FREE, limits)
    assert kernel.follow(4, np.zeros((5, 2)), 1e5, tape, FREE, limits)[2] == 5
    with pytest.raises(ValueError, match="no room"):
        kernel.observe(accounts, np.zeros((10, 1), np.float32), tape.mark, 5, np.array([0, -1, 2, 3]), 3)


@given(rates=rates, rules=rules)
@settings(deadline=None, max_examples=20)
def test_zero_weights_earn_exactly_zero(rates, rules):
    tape = tape_of(random_bars(50, 3), Costs())
    account = new_account(rules.initial_cash, 2, 3)
    for t in range(49):
        prices = tape.at(np.full(2, t))
        account, bill = advance(account, np.zeros((2, 3)), prices, rates, limits_of(rules))
        assert_array_equal(equity(account, prices.next_mark), rules.initial_cash)
        assert_array_equal(bill.costs, 0.0)


@given(seed=st.integers(0, 2**32), rules=rules)
def test_targets_keep_inside_bounds_and_gross_cap(seed, rules):
    action = np.random.default_rng(seed).uniform(-3, 3, (20, 5))
    weight = target_weights(action, limits_of(rules))
    assert (np.abs(weight).sum(axis=1) <= rules.gross_cap * (1 + 1e-12)).all()
    assert weight.min() >= (0.0 if rules.long_only else -1.0)
    inside = np.abs(np.clip(action, -1, 1)).sum(axis=1) <= rules.gross_cap
    if not rules.long_only:
        assert_array_equal(weight[inside], np.clip(action, -1, 1)[inside])


def test_a_round_trip_by_hand():
    """100,000 cash, weight 0.5 at close 100, filled at 101 with 10 bps of spread and 20 bps of fee, close 110."""
    prices = tape_of(random_bars(3, 1), Costs(impact=0.0)).at(np.array([0]))
    prices = prices._replace(mark=np.array([[100.0]]), open=np.array([[101.0]]), next_mark=np.array([[110.0]]))
    rate = CostRates(fee=0.002, adverse=0.001, impact=0.0, funding=0.0, borrow=0.0)
    account, bill = advance(new_account(1e5, 1, 1), np.array([[0.5]]), prices, rate, limits_of(AccountRules()))
    paid = 101.0 * 1.001
    assert account.units[0, 0] == 500.0
    assert_allclose(account.cash[0], 1e5 - 500 * paid - 0.002 * 500 * paid)
    assert_allclose(bill.costs[0], 500 * 101 * 0.001 + 0.002 * 500 * paid)
    assert_allclose(bill.fees[0], 0.002 * 500 * paid)
    assert_allclose(bill.turnover[0], 0.505)
    assert account.entry[0, 0] == paid


def test_impact_grows_with_the_root_of_participation_and_is_capped():
    account = new_account(1e9, 4, 1)
    traded = np.array([[1.0], [4.0], [100.0], [400.0]])
    _, costs, _ = fill(
        account, traded, np.full((4, 1), 1.0), np.full((4, 1), 0.02), np.full((4, 1), 100.0), FREE._replace(impact=0.5)
    )
    assert_allclose(costs / traded[:, 0], [0.5 * 0.02 * 0.1, 0.5 * 0.02 * 0.2, 0.5 * 0.02, 0.5 * 0.02])


def test_the_entry_price_follows_the_open_position():
    account, free = new_account(1e6, 1, 1), FREE
    entries = []
    for traded, price in [(10, 100), (10, 110), (-5, 130), (-30, 90), (15, 80)]:
        one = np.array([[float(traded)]]), np.array([[float(price)]]), np.zeros((1, 1)), np.ones((1, 1))
        account, _, _ = fill(account, *one, free)
        entries.append(account.entry[0, 0])
    assert entries == [100.0, 105.0, 105.0, 90.0, 0.0]


def test_a_yearly_borrow_rate_is_paid_in_parts():
    rate = cost_rates(Costs(borrow_bps_per_year=365.0), bars_per_year=365.0)
    assert_allclose(rate.borrow, 1e-4)
    short = Account(np.array([2000.0]), np.array([[-10.0]]), np.array([[100.0]]))
    assert_allclose(carry(short, np.array([[100.0]]), FREE._replace(borrow=rate.borrow))[1], 0.1)


def test_impact_without_volume_is_refused():
    bars = random_bars(20, 1)
    silent = type(bars).from_arrays(bars.ts, ["S0"], bars.open, bars.high, bars.low, bars.close, bars.volume * 0)
    with pytest.raises(ConfigError, match="impact=0"):
        tape_of(silent, Costs())
    tape_of(silent, Costs(impact=0.0))
