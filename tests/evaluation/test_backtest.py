"""Backtests: the same money as the environment, warmed memory, benchmarks and stress in closed form."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tailguard.env import AccountRules, Costs, EnvConfig, TradingVecEnv, follow, oracle_env, replay, sequential
from tailguard.errors import ConfigError
from tailguard.evaluation import backtest, measures
from tailguard.evaluation.backtest import (
    break_even_bps,
    buy_and_hold,
    cost_stress,
    follow_targets,
    scaled_costs,
    volatility_matched,
)
from tailguard.market import Bars
from tailguard.market.oracles import oracle_market
from tests.agents import tiny_agent

FREE = Costs(fee_bps=0, half_spread_bps=0, slippage_bps=0, impact=0, borrow_bps_per_year=0)
RULES = AccountRules()


def bars_of(close: np.ndarray, open_: np.ndarray | None = None) -> Bars:
    """Bars whose open is the close before it unless told."""
    close = np.asarray(close, dtype=np.float64).reshape(len(close), -1)
    opens = np.vstack([close[:1], close[:-1]]) if open_ is None else np.asarray(open_).reshape(close.shape)
    ts = np.datetime64("2024-01-01", "ms") + np.arange(len(close)) * np.timedelta64(3_600_000, "ms")
    symbols = [f"S{i}" for i in range(close.shape[1])]
    high, low = np.maximum(opens, close), np.minimum(opens, close)
    return Bars.from_arrays(ts, symbols, opens, high, low, close, np.full(close.shape, 1e9))


def walk(n: int = 400, n_assets: int = 2, seed: int = 0) -> Bars:
    rng = np.random.default_rng(seed)
    close = 100 * np.exp(np.cumsum(rng.normal(0, 0.01, (n, n_assets)), axis=0))
    return bars_of(close, np.vstack([close[:1], close[:-1]]) * np.exp(rng.normal(0, 0.002, close.shape)))


def env_of(bars: Bars, **changes: object) -> TradingVecEnv:
    features = np.random.default_rng(1).normal(size=(*bars.close.shape, 2))
    return TradingVecEnv(bars, features, ["a", "b"], config=EnvConfig(episode_length=50, **changes))


def jumpy(observation: np.ndarray) -> np.ndarray:
    """A policy of what it sees: features and the weights it holds."""
    return np.clip(observation[:, [0, 2]] + 0.3 * observation[:, [4, 5]], -1, 1)


def test_a_backtest_is_the_environments_own_account():
    env = env_of(walk())
    found = backtest(env, jumpy, 100, 300)
    record = replay(sequential(env, 100, 301), jumpy)
    assert_allclose(found.equity[1:] * RULES.initial_cash, record.equity[:, 0], rtol=1e-12)
    assert_array_equal(found.weights[:-1], record.weights[:-1, 0])  # after the last step the environment starts again
    assert len(found) == 200
    assert found.decided_at[0] == env.bars.ts[100] + env.bars.step
    assert found.fill_at[0] == env.bars.ts[101]


@pytest.mark.parametrize("band", [0.0, 0.1])
def test_following_decisions_gives_the_environments_money_bit_for_bit(band):
    account = AccountRules(no_trade_band=band, gross_cap=1.5)
    env = env_of(walk(), account=account)
    targets = np.random.default_rng(2).uniform(-1, 1, (200, 2))
    decisions = iter(targets)
    record = replay(sequential(env, 100, 301), lambda _: next(decisions)[None])
    found = follow(env.bars, targets, first=100, costs=env.config.costs, account=account)
    for name in ("bar", "reward", "equity", "costs", "fees", "turnover"):
        assert_array_equal(getattr(found, name), getattr(record, name), err_msg=name)
    assert_array_equal(found.weights[:-1], record.weights[:-1])


def test_a_recurrent_policy_is_warmed_before_its_first_decision_without_trading():
    """Warmed on k bars, the first decision is that of an agent that saw those bars with an empty account."""
    env = oracle_env(oracle_market("regime"), n_envs=2, n_bars=400)
    agent = tiny_agent(env)
    cold, warm = backtest(env, agent, 200, 260), backtest(env, agent, 200, 260, warm_up=50)
    assert len(cold) == len(warm) == 60
    assert not np.array_equal(cold.targets[0], warm.targets[0])
    state, starts = None, np.ones(1, dtype=bool)
    for t in range(150, 201):
        seen = np.concatenate([env._rows[t], [0.0]]).astype(np.float32)[None]  # features, and no weight held
        action, state = agent.predict(seen, state=state, episode_start=starts, deterministic=True)
        starts = np.zeros(1, dtype=bool)
    assert_array_equal(warm.targets[0], action[0])
    assert warm.turnover[0] > 0.0


def test_quantiles_are_those_the_agent_predicts_at_each_decision():
    env = oracle_env(oracle_market("regime"), n_envs=2, n_bars=300)
    agent = tiny_agent(env)
    found = backtest(env, agent, 200, 220, with_quantiles=True)
    assert found.quantiles is not None
    assert found.quantiles.shape == (20, 8)
    first = np.concatenate([env._rows[200], [0.0]]).astype(np.float32)[None]
    assert_array_equal(found.quantiles[0], agent.predict_quantiles(first)[0])


def test_buying_and_holding_without_costs_earns_the_mean_of_the_prices():
    bars = walk(n_assets=3)
    found = buy_and_hold(bars, 50, 300, costs=FREE, account=AccountRules(gross_cap=2.0))
    units = (1.0 / 3.0) / bars.close[50]
    worth = 1.0 + (units * (bars.close[51:351] - bars.open[51])).sum(axis=1)
    assert_allclose(found.equity[1:], worth, rtol=1e-12)
    assert np.count_nonzero(found.turnover) == 1


def test_buying_and_holding_pays_for_its_one_trade():
    bars = bars_of(np.full(60, 100.0))
    costs = FREE.replace(fee_bps=10.0)
    found = buy_and_hold(bars, 5, 40, costs=costs, account=RULES)
    assert_allclose(found.equity[-1], 1.0 - 10e-4, rtol=1e-12)


def test_a_matched_benchmark_has_the_strategys_volatility_and_its_own_sharpe_ratio():
    env = env_of(walk())
    strategy = backtest(env, jumpy, 100, 300)
    held = buy_and_hold(env.bars, 100, 200, costs=FREE, account=RULES)
    matched = volatility_matched(held, strategy)
    assert_allclose(measures.annual_volatility(matched.returns, 252), measures.annual_volatility(strategy.returns, 252))
    assert_allclose(measures.sharpe(matched.returns, 252), measures.sharpe(held.returns, 252))


def test_more_costs_earn_less_and_no_costs_are_none():
    env = env_of(walk())
    base = backtest(env, jumpy, 100, 300)
    found = cost_stress(env.bars, base, costs=env.config.costs, account=RULES)
    assert [s.name for s in found] == ["0 x costs", "1 x costs", "2 x costs", "4 x costs", "one bar late"]
    totals = [measures.total_return(s.result.returns) for s in found[:4]]
    assert totals == sorted(totals, reverse=True)
    assert found[0].result.costs.sum() == 0.0
    assert_array_equal(found[1].result.returns, base.returns)
    assert scaled_costs(Costs(), 2.0) == Costs(
        fee_bps=4, half_spread_bps=2, slippage_bps=2, impact=0.2, borrow_bps_per_year=100
    )


def test_a_bar_of_delay_fills_every_decision_at_the_next_open():
    """Alternating bars of +1 % and -1 %: holding only the good ones earns, one bar later it holds only the bad ones."""
    close = 100 * np.cumprod(np.where(np.arange(100) % 2, 1.01, 0.99))
    bars = bars_of(close)
    targets = (np.arange(10, 90) % 2 == 0).astype(float)[:, None]  # at even bars, for the odd, rising ones
    base = follow_targets(bars, targets, 10, costs=FREE, account=RULES)
    late = cost_stress(bars, base, costs=FREE, account=RULES)[-1].result
    assert_allclose(measures.total_return(base.returns), 1.01**40 - 1)
    assert_allclose(measures.total_return(late.returns), 0.99**40 - 1)


def test_the_break_even_cost_is_the_one_that_leaves_nothing():
    """A round trip through a 1 % rise breaks even at a fee of about half of it."""
    bars = bars_of([100.0, 100.0, 100.0, 101.0, 101.0, 101.0])
    rules = AccountRules(no_trade_band=0.02)
    base = follow_targets(bars, [[1.0], [1.0], [0.0]], 1, costs=FREE, account=rules)
    found = break_even_bps(bars, base, rules)
    assert found is not None
    # 100,000 buys 1,000 at 100; sold at 101: 1,000 earned against fee * (100,000 + 101,000)
    assert_allclose(found, 1_000 / 201_000 * 1e4, rtol=2e-3)


def test_break_even_without_profit_or_without_trades():
    falling = bars_of([100.0, 100.0, 100.0, 99.0, 98.0, 97.0])
    long = follow_targets(falling, [[1.0], [1.0], [1.0]], 1, costs=FREE, account=RULES)
    assert break_even_bps(falling, long, RULES) == 0.0
    idle = follow_targets(falling, [[0.0], [0.0], [0.0]], 1, costs=FREE, account=RULES)
    assert break_even_bps(falling, idle, RULES) is None


def test_after_ruin_nothing_happens_any_more():
    bars = bars_of(np.concatenate([np.full(10, 100.0), [50.0, 4.0, 100.0, 200.0, 100.0, 150.0, 100.0]]))
    rules = AccountRules(gross_cap=1.0, ruin_fraction=0.2)
    env = TradingVecEnv(bars, config=EnvConfig(episode_length=3, costs=FREE, account=rules))
    found = backtest(env, lambda seen: np.ones((1, 1)), 5, 16)
    followed = follow_targets(bars, np.ones((11, 1)), 5, costs=FREE, account=rules)
    for result in (found, followed):
        assert_allclose(result.equity[-1], 0.04)
        assert (result.returns[7:] == 0.0).all()
        assert (result.weights[7:] == 0.0).all()
    assert_array_equal(found.returns, followed.returns)


def test_a_stretch_that_does_not_fit_is_refused():
    env = env_of(walk())
    with pytest.raises(ConfigError, match="needs 30 bars before and one after"):
        backtest(env, jumpy, 20, 100, warm_up=30)
    with pytest.raises(ConfigError, match="needs one more bar"):
        follow_targets(env.bars, np.zeros((400, 2)), 0, costs=FREE, account=RULES)
