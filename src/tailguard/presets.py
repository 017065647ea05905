"""Presets: a task, the settings that solve it, and how long that takes. Each is a function that returns one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from stable_baselines3.common.type_aliases import MaybeCallback

from tailguard.env import EnvConfig, OracleScore, oracle_env, score
from tailguard.env.oracle import oracle_config
from tailguard.errors import ConfigError, did_you_mean
from tailguard.market.oracles import OracleMarket, oracle_market
from tailguard.ppo import DistributionalPPO, PPOConfig
from tailguard.schedules import Schedule


@dataclass(frozen=True)
class Preset:
    """A market, the learner's settings for it, and the steps it is given."""

    name: str
    market: OracleMarket
    config: PPOConfig
    total_timesteps: int
    n_envs: int = 64
    policy_kwargs: dict[str, Any] = field(default_factory=dict)
    no_trade_band: float = 0.0
    """Of the account: targets nearer than this to the weight held are not traded."""

    @property
    def env_config(self) -> EnvConfig:
        """The environment to train and to examine in."""
        return oracle_config(self.market, no_trade_band=self.no_trade_band)

    def agent(self, seed: int, policy: str = "MlpLstmPolicy") -> DistributionalPPO:
        """A fresh agent in a fresh draw of the market."""
        env = oracle_env(self.market, self.n_envs, seed, config=self.env_config)
        return DistributionalPPO(policy, env, config=self.config, policy_kwargs=self.policy_kwargs, seed=seed)

    def train(self, seed: int, policy: str = "MlpLstmPolicy", callback: MaybeCallback = None) -> DistributionalPPO:
        """The agent after its whole training."""
        return self.agent(seed, policy).learn(self.total_timesteps, callback)

    def score(self, agent: DistributionalPPO, seed: int) -> OracleScore:
        """Out of sample: a draw of the market that no training seed uses, deterministic actions."""
        return score(self.market, agent, seed=1_000_000 + seed, no_trade_band=self.no_trade_band)


def trading_config(**settings: Any) -> PPOConfig:
    """What the oracle markets share: rewards are nearly all noise, and an action's effect fades within tens of bars."""
    base = {
        "learning_rate": Schedule(start=3e-3, end=0.0),
        "n_steps": 128,
        "n_epochs": 4,
        "gamma": 0.9,
        "gae_lambda": 0.9,
    }
    return PPOConfig(**{**base, **settings})


def regime(**constants: Any) -> Preset:
    """Hidden two-state drift, only returns are seen: without memory there is nothing to earn."""
    return Preset("regime", oracle_market("regime", **constants), trading_config(), 1_000_000)


def regime_hard() -> Preset:
    """A drift of 15 bps that switches once in a hundred bars."""
    market = oracle_market("regime", drift_bps=15.0, switch_probability=0.01)
    return Preset("regime_hard", market, trading_config(gamma=0.95, hindsight=True), 2_000_000)


def signal(**constants: Any) -> Preset:
    """An AR(1) signal is seen; costs decide when to follow it."""
    return Preset("signal", oracle_market("signal", **constants), trading_config(), 800_000)


def noise(**constants: Any) -> Preset:
    """Nothing to earn: the best is not to trade.

    Prices' own moves are taken out of the advantages, so less luck is learned; what is left of it wishes for weights of
    a hundredth or two, and the account does not trade such wishes.
    """
    config = trading_config(vf_coef=0.5, gae_lambda=0.5, hindsight=True, return_scale={"horizon": 20})
    kwargs = {"log_std_init": -1.5, "log_std_end": -4.0}
    market = oracle_market("noise", **constants)
    return Preset("noise", market, config, 800_000, policy_kwargs=kwargs, no_trade_band=0.1)


def pairs(**constants: Any) -> Preset:
    """Two cointegrated assets on shared cash. Without hindsight some seeds stay below 0.7 of the optimum."""
    return Preset("pairs", oracle_market("pairs", **constants), trading_config(hindsight=True), 1_600_000)


def crash(alpha: float = 0.05, cvar_limit: float | None = -0.04, **constants: Any) -> Preset:
    """Carry with rare jumps: all in without a limit; with one, about as much as a single jump may cost.

    One bar in 500 says something of the tail, so an advantage must not hold anything else: returns of neighbouring bars
    are independent, so traces are short, prices' own moves are taken out, and where trading is free no value sees the
    weight held (docs/risk.md). Clipping ratios and norms tightly would cut off the few steps with a jump.
    """
    market = oracle_market("crash", **constants)
    free = cvar_limit is None
    config = trading_config(
        n_steps=125,
        gamma=0.9 if free else 0.97,
        gae_lambda=0.2,
        vf_coef=0.5,
        clip_range=0.4,
        max_grad_norm=2.0,
        ent_coef=0.02,  # noise stays at its ceiling: a policy moves by a fraction of its noise
        hindsight=True,
        critic={"twin": False, "n_quantiles": 16},
        risk={"mode": "none"} if free else crash_risk(alpha, cvar_limit),
    )
    # under a limit noise is part of the tail; without one the way to all in is longer
    first, last = (-1.4, -3.2) if free else (-2.0, -3.5)
    kwargs = {"memory": "none", "net_arch": [32, 32], "log_std_init": first, "log_std_end": last}
    if market.cost == 0.0:
        kwargs["hidden_from_critics"] = [1]  # the weight held
    return Preset("crash", market, config, 3_200_000 if free else 9_600_000, n_envs=256, policy_kwargs=kwargs)


def crash_risk(alpha: float, cvar_limit: float | None) -> dict[str, Any]:
    """A limit whose price stands still while exploration is most of the tail, and goes on moving to the end."""
    return {
        "mode": "episode",
        "alpha": alpha,
        "cvar_limit": cvar_limit,
        "gae_lambda": 0.2,
        "dual_init": 0.5,
        "dual_delay": 0.3,
        "dual_learning_rate": Schedule(start=1.0, end=0.3),
        "window": ceil(50 / alpha),
    }


PRESETS: dict[str, Callable[[], Preset]] = {
    "regime": regime,
    "regime_hard": regime_hard,
    "signal": signal,
    "noise": noise,
    "pairs": pairs,
    "crash": crash,
}


def preset(name: str) -> Preset:
    """The preset of that name."""
    if name not in PRESETS:
        raise ConfigError(f"There is no preset {name!r}.{did_you_mean(name, PRESETS)} Known: {', '.join(PRESETS)}.")
    return PRESETS[name]()
