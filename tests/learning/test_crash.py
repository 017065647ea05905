"""The crash market: what a CVaR limit costs and whether it holds is known by dynamic programming."""

from __future__ import annotations

import pytest

from tailguard.env import replay
from tailguard.env.oracle import stretches_env
from tailguard.losses.risk import empirical_cvar
from tailguard.market.oracles import CrashMarket
from tailguard.presets import crash
from tests.learning.seeds import heard_by, interquartile_mean, over_seeds

pytestmark = pytest.mark.slow
ALPHA, LIMIT = 0.05, -0.04


def out_of_sample(seed: int, limited: bool) -> tuple[float, float]:
    """Mean and CVaR of the episode return of the deterministic policy, 8,000 episodes of a fresh draw."""
    task = crash(alpha=ALPHA, cvar_limit=LIMIT if limited else None)
    agent = task.agent(seed)
    heard = heard_by(agent)
    agent.learn(task.total_timesteps)
    assert heard == [], f"seed {seed}"
    env = stretches_env(task.market, 1_000_000 + seed, 8_000, CrashMarket().episode_length)
    returns = replay(env, agent, CrashMarket().episode_length).reward.sum(axis=0)
    return float(returns.mean()), empirical_cvar(returns, ALPHA)


def test_without_a_limit_the_agent_takes_the_risk_neutral_optimum() -> None:
    market = CrashMarket()
    mean, cvar = interquartile_mean(over_seeds(out_of_sample, False))
    assert mean == pytest.approx(market.episode_reward(market.episode_length), rel=0.1)
    assert cvar == pytest.approx(market.period_cvar(1.0, ALPHA), rel=0.1)


def test_a_cvar_limit_holds_out_of_sample() -> None:
    mean, cvar = interquartile_mean(over_seeds(out_of_sample, True))
    assert cvar == pytest.approx(LIMIT, rel=0.1)
    assert mean == pytest.approx(CrashMarket().cvar_limited(ALPHA, LIMIT).episode_reward, rel=0.1)
