"""Oracle markets as environments, and results as fractions of the optimum."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from tailguard.env.accounting import AccountRules
from tailguard.env.costs import Costs
from tailguard.env.observation import AgentState
from tailguard.env.replay import Policy, replay
from tailguard.env.vec_env import EnvConfig, TradingVecEnv
from tailguard.market import Bars
from tailguard.market.oracles import CrashMarket, OracleMarket


def oracle_config(market: OracleMarket, episode_length: int | None = None, no_trade_band: float = 0.0) -> EnvConfig:
    """The market's cost per unit traded and nothing else; its own episode length where it has one.

    The agent sees its weight, which is all of its account that an optimum depends on; where tails matter, also the
    time left and the return of the period so far. What identifies a path but not its future only invites the policy
    to learn luck by heart.
    """
    own = market.episode_length if isinstance(market, CrashMarket) else 250
    tail: tuple[AgentState, ...] = ("time_left", "period_return") if isinstance(market, CrashMarket) else ()
    return EnvConfig(
        episode_length=episode_length or own,
        agent_state=("weight", *tail),
        costs=Costs(fee_bps=market.cost_bps, half_spread_bps=0, slippage_bps=0, impact=0, borrow_bps_per_year=0),
        account=AccountRules(gross_cap=market.gross_cap, no_trade_band=no_trade_band),
    )


def oracle_env(
    market: OracleMarket,
    n_envs: int = 1,
    seed: int = 0,
    *,
    n_bars: int = 1_000_000,
    episode_length: int | None = None,
    config: EnvConfig | None = None,
) -> TradingVecEnv:
    """Episodes at random places of one long draw; what the agent sees is what the market's optimum assumes it sees.

    The draw is long because a short one is learned by heart: with 200,000 bars an agent on `noise` lost 0.48 bps per
    bar out of sample, with a million half of that.
    """
    return env_of(market, market.bars(n_bars, seed), config or oracle_config(market, episode_length), n_envs, seed=seed)


def env_of(
    market: OracleMarket, bars: Bars, config: EnvConfig, n_envs: int, *, seed: int = 0, starts: Any = None
) -> TradingVecEnv:
    """The environment of any bars of a market, with the market's own features."""
    return TradingVecEnv(
        bars,
        market.features(bars),
        market.feature_names,
        n_envs=n_envs,
        look_back=market.look_back,
        starts=starts,
        seed=seed,
        config=config,
    )


@dataclass(frozen=True)
class OracleScore:
    """What a policy earned per step beside what the best policy earned on the same bars."""

    reward_per_step: float
    stderr: float
    optimal_on_path: float
    """Of the best policy on the same bars: most of the luck cancels in the ratio."""
    optimal_expected: float
    """By dynamic programming, for episodes of this length that start flat."""
    fraction: float
    """reward_per_step / optimal_on_path; nan where the best is not to trade."""
    fraction_stderr: float
    n_steps: int


def score(
    market: OracleMarket,
    policy: Policy,
    *,
    seed: int = 1,
    n_paths: int = 64,
    n_steps: int = 2_000,
    no_trade_band: float = 0.0,
) -> OracleScore:
    """Run `policy` once over n_paths stretches of n_steps bars each, which do not overlap; deterministic actions.

    The band is that of the policy's account; the best policy trades without one.
    """
    earned = path_rewards(policy, stretches_env(market, seed, n_paths, n_steps, no_trade_band))
    best = path_rewards(market.policy(), stretches_env(market, seed, n_paths, n_steps))
    mean, top = float(earned.mean()), float(best.mean())
    fraction = mean / top if top != 0.0 else float("nan")
    # delta method: the ratio of means varies like the mean of (earned - fraction * best) / mean(best)
    spread = float((earned - fraction * best).std(ddof=1)) / abs(top) if top != 0.0 else float("nan")
    return OracleScore(
        reward_per_step=mean,
        stderr=float(earned.std(ddof=1)) / sqrt(n_paths),
        optimal_on_path=top,
        optimal_expected=market.episode_reward(n_steps) / n_steps,
        fraction=fraction,
        fraction_stderr=spread / sqrt(n_paths),
        n_steps=n_paths * n_steps,
    )


def path_rewards(policy: Policy, env: TradingVecEnv) -> np.ndarray:
    """(N,) mean reward per step of each environment's stretch."""
    rewards: np.ndarray = replay(env, policy, env.length).reward.mean(axis=0)
    return rewards


def stretches_env(
    market: OracleMarket, seed: int, n_paths: int, n_steps: int, no_trade_band: float = 0.0
) -> TradingVecEnv:
    """n_paths environments, the i-th on the i-th stretch of n_steps bars."""
    bars = market.bars(n_paths * (n_steps + 1) + market.look_back, seed)
    starts = market.look_back + np.arange(n_paths) * (n_steps + 1)
    return env_of(market, bars, oracle_config(market, n_steps, no_trade_band), n_paths, starts=starts)
