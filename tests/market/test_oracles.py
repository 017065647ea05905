"""Optima by independent routes: closed forms, finer grids, Monte Carlo of the policy in the environment."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tailguard.env import oracle_env, replay, score
from tailguard.env.oracle import stretches_env
from tailguard.errors import ConfigError
from tailguard.market.oracles import MARKETS, oracle_market, solver
from tailguard.market.oracles.base import solved
from tailguard.market.oracles.chain import Sizes, gaussian
from tailguard.market.oracles.solver import Band

FAST = [("regime", {}), ("signal", {})]
OTHERS = [
    ("regime", {"drift_bps": 15, "switch_probability": 0.01}),
    ("regime", {"cost_bps": 0}),
    ("regime", {"cost_bps": 20}),
    ("regime", {"switch_probability": 0.2, "drift_bps": 60}),
    ("signal", {"cost_bps": 0}),
    ("signal", {"persistence": 0.97, "r_squared": 0.01, "cost_bps": 20}),
    ("pairs", {}),
    ("pairs", {"cost_bps": 20, "half_life_bars": 5}),
    ("crash", {}),
    ("crash", {"cost_bps": 10, "carry_bps": 3.0}),
]


def ids(case) -> str:
    return f"{case[0]} {case[1]}" if isinstance(case, tuple) else str(case)


def agrees_with_simulation(name: str, constants: dict, n_steps: int, n_paths: int) -> None:
    market = oracle_market(name, **constants)
    found = score(market, market.policy(), n_paths=n_paths, n_steps=n_steps)
    assert abs(found.reward_per_step - found.optimal_expected) < 3.5 * found.stderr
    assert found.stderr < 0.2 * abs(found.optimal_expected)
    assert found.fraction == 1.0
    record = replay(stretches_env(market, 1, n_paths, n_steps), market.policy(), n_steps)
    assert_allclose(record.reward.std(), market.optimum.reward_std, rtol=0.02)
    assert_allclose(record.turnover.mean(), market.optimum.turnover_per_step, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("case", FAST, ids=ids)
def test_the_policy_earns_what_dynamic_programming_says(case):
    agrees_with_simulation(*case, n_steps=1000, n_paths=64)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAST + OTHERS, ids=ids)
def test_the_policy_earns_what_dynamic_programming_says_for_other_constants(case):
    agrees_with_simulation(*case, n_steps=4000, n_paths=200)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAST + OTHERS, ids=ids)
def test_a_finer_grid_gives_the_same_optimum(case):
    market = oracle_market(case[0], **case[1])
    _, solution = solved(market)
    sizes = Sizes(2 * solution.sizes.states - 1, solution.sizes.weights, solution.sizes.nodes + 6)
    finer = solver.solve(market.chain(sizes), sizes, warm=solution)
    assert_allclose(finer.reward_per_step, solution.reward_per_step, rtol=3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*FAST, ("pairs", {})], ids=ids)
@pytest.mark.parametrize("change", ["wider", "narrower", "later", "smaller"])
def test_no_change_of_the_policy_earns_more(case, change):
    """Paired on the same bars, so most of the luck cancels."""
    market, policy = oracle_market(case[0], **case[1]), oracle_market(case[0], **case[1]).policy()
    band = policy.band
    middle, half = 0.5 * (band.low + band.high), 0.5 * (band.high - band.low)
    policy.band = {
        "wider": Band(band.grid, np.clip(middle - 1.5 * half - 0.1, -1, 1), np.clip(middle + 1.5 * half + 0.1, -1, 1)),
        "narrower": Band(band.grid, middle, middle),
        "later": Band(band.grid * 1.5, band.low, band.high),
        "smaller": Band(band.grid, 0.8 * band.low, 0.8 * band.high),
    }[change]
    found = score(market, policy, n_paths=200, n_steps=2000)
    assert found.fraction < 1.0 + 2.0 * found.fraction_stderr


def test_without_costs_the_signal_optimum_is_a_one_bar_problem():
    """Free trading: the best weight of each bar maximises the growth of that bar; integrate over the signal."""
    market = oracle_market("signal", cost_bps=0)
    z = np.linspace(-8, 8, 1001)
    weight = np.exp(-0.5 * z**2) / np.exp(-0.5 * z**2).sum()
    noise, p = gaussian(21)
    ret = 0.01 * (np.sqrt(0.02) * z[:, None] + np.sqrt(0.98) * noise)
    growth = [np.log1p(w * ret) @ p for w in np.linspace(-1, 1, 41)]
    assert_allclose(solved(market)[1].reward_per_step, weight @ np.max(growth, axis=0), rtol=3e-3)


@pytest.mark.slow
def test_without_costs_the_regime_optimum_is_a_filter_and_a_one_bar_problem():
    market = oracle_market("regime", cost_bps=0)
    path = market.path(400_000, seed=5)
    belief = np.zeros(1)
    odds = np.empty(len(path.returns))
    for t, r in enumerate(path.returns[:, 0]):
        odds[t] = belief[0]
        belief = market.learned(belief, np.array([r]))
    mean = market.drift * np.tanh(odds / 2)
    weight = np.clip(mean / (market.volatility**2 + market.drift**2), -1, 1)  # Kelly, to second order
    reward = np.log1p(weight * path.returns[:, 0])
    error = reward.std() / np.sqrt(len(reward)) * 3.5
    assert abs(reward.mean() - market.optimum.reward_per_step) < error


def test_the_crash_optimum_is_the_best_constant_weight():
    market = oracle_market("crash")
    returns, prob = market.outcomes(31)
    growth = [prob @ np.log1p(w * returns) for w in np.linspace(-1, 1, 201)]
    assert_allclose(market.optimum.reward_per_step, max(growth), rtol=1e-3)
    assert_allclose(market.episode_reward(250), 250 * max(growth), rtol=1e-3)
    assert_allclose(market.mean_return, 2.4e-4)


def test_the_limited_constant_weight_agrees_with_simulation():
    market = oracle_market("crash")
    limited = market.constant_weight(alpha=0.05, limit=-0.04)
    assert_allclose(limited.cvar, -0.04, rtol=1e-6)
    assert limited.weight < 0.5
    rng = np.random.default_rng(0)
    jumps = rng.uniform(size=(20_000, 250)) < 0.002
    total = np.log1p(limited.weight * (4e-4 + 0.003 * rng.normal(size=jumps.shape) - 0.08 * jumps)).sum(axis=1)
    assert_allclose(total.mean(), limited.episode_reward, atol=4 * total.std() / np.sqrt(len(total)))
    assert_allclose(np.sort(total)[:1000].mean(), -0.04, rtol=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("constants", [{}, {"cost_bps": 5.0, "episode_length": 100}], ids=str)
def test_the_limited_optimum_agrees_with_simulation_and_beats_a_constant_weight(constants):
    market = oracle_market("crash", **constants)
    limited, constant = market.cvar_limited(0.05, -0.04), market.constant_weight(0.05, -0.04)
    assert limited.episode_reward > constant.episode_reward
    assert limited.episode_reward < market.episode_reward(market.episode_length)
    assert -0.04 <= limited.cvar < -0.04 * 0.99
    n = market.episode_length
    runs = [replay(stretches_env(market, seed, 4000, n), limited.policy, n).reward.sum(axis=0) for seed in range(5)]
    total = np.sort(np.concatenate(runs))
    assert_allclose(total.mean(), limited.episode_reward, atol=4 * total.std() / np.sqrt(len(total)) + 3e-4)
    assert_allclose(total[: len(total) // 20].mean(), limited.cvar, rtol=0.06)


def test_a_loose_limit_does_not_bind():
    market = oracle_market("crash", episode_length=20)
    loose = market.constant_weight(0.05, -0.5)
    assert loose.weight == 1.0
    with pytest.raises(ConfigError, match="negative limit"):
        market.cvar_limited(0.05, 0.01)
    with pytest.raises(ConfigError, match="alpha"):
        market.constant_weight(1.5, -0.04)


def test_on_noise_the_best_is_not_to_trade():
    market = oracle_market("noise")
    assert market.optimum.reward_per_step == market.optimum.sharpe_per_step == market.episode_reward(250) == 0.0
    chain = market.chain(Sizes())
    assert abs(solver.solve(chain, Sizes()).reward_per_step) < 1e-8  # the general solver knows it too
    found = score(market, market.policy(), n_paths=4, n_steps=100)
    assert found.reward_per_step == 0.0
    held = score(market, lambda observation: np.ones((len(observation), 1)), n_paths=64, n_steps=500)
    assert held.reward_per_step < 2 * held.stderr


def test_a_memoryless_policy_earns_about_nothing_on_regime():
    found = score(oracle_market("regime"), lambda seen: np.clip(seen[:, :1], -1, 1), n_paths=64, n_steps=1000)
    assert found.fraction < 0.2


@pytest.mark.parametrize("name", MARKETS)
def test_draws_have_the_moments_they_claim(name):
    market = oracle_market(name)
    path = market.path(200_000, seed=3)
    returns = path.returns
    assert_array_equal(returns, market.path(200_000, seed=3).returns)
    assert (returns != market.path(200_000, seed=4).returns).any()
    expected = {
        "signal": 0.01,
        "regime": np.hypot(0.01, 0.0025),
        "crash": np.hypot(0.003, 0.08 * np.sqrt(0.002 * 0.998)),
        "noise": 0.01,
        "pairs": np.hypot(0.01, 0.5 * np.sqrt(2 - 2 * 0.5 ** (1 / 20)) * 0.02),
    }[name]
    assert_allclose(returns.std(axis=0), expected, rtol=0.03)
    if name == "signal":
        z = path.hidden["signal"]
        assert_allclose(np.corrcoef(z[:-1], z[1:])[0, 1], 0.9, atol=0.01)
        assert_allclose(np.corrcoef(z[:-1], returns[1:, 0])[0, 1] ** 2, 0.02, atol=0.004)
    if name == "regime":
        assert_allclose((np.diff(path.hidden["state"]) != 0).mean(), 0.02, atol=0.002)
    if name == "pairs":
        spread = np.log(np.cumprod(1 + returns, axis=0) @ np.diag([1.0, 1.0]))
        assert_allclose(spread[:, 0] - spread[:, 1], path.hidden["spread"], atol=1e-6)


@pytest.mark.parametrize("name", MARKETS)
def test_the_environment_shows_what_the_optimum_assumes(name):
    market = oracle_market(name)
    env = oracle_env(market, n_envs=3, seed=2, n_bars=2000)
    bars = env.bars
    assert_array_equal(bars.open[1:], bars.close[:-1])
    assert env.layout.names[0] == f"{market.feature_names[0]}:{market.symbols[0]}"
    assert env.layout.columns_of("weight") == [len(market.symbols) + a for a in range(len(market.symbols))]
    observation = env.reset()
    assert_array_equal(observation[:, : len(market.symbols)], market.features(bars)[env.t][:, :, 0])
    env.step(np.full((3, len(market.symbols)), 0.5))
    assert_allclose(env.costs, market.cost * 0.5 * 1e5 * len(market.symbols), rtol=1e-6)


def test_constants_are_checked_by_name():
    with pytest.raises(ConfigError, match='Did you mean "drift_bps"'):
        oracle_market("regime", drift_bp=3)
    with pytest.raises(ConfigError, match='Did you mean "regime"'):
        oracle_market("regimes")
    with pytest.raises(ConfigError, match="fewer bars"):
        oracle_market("crash", carry_bps=100.0).bars(200_000)
