"""Presets: a task, the settings that solve it, and how long that takes. Each is a function that returns one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from stable_baselines3.common.type_aliases import MaybeCallback

from tailguard.env import OracleScore, oracle_env, score
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

    def agent(self, seed: int, policy: str = "MlpLstmPolicy") -> DistributionalPPO:
        """A fresh agent in a fresh draw of the market."""
        env = oracle_env(self.market, self.n_envs, seed)
        return DistributionalPPO(policy, env, config=self.config, policy_kwargs=self.policy_kwargs, seed=seed)

    def train(self, seed: int, policy: str = "MlpLstmPolicy", callback: MaybeCallback = None) -> DistributionalPPO:
        """The agent after its whole training."""
        return self.agent(seed, policy).learn(self.total_timesteps, callback)

    def score(self, agent: DistributionalPPO, seed: int) -> OracleScore:
        """Out of sample: a draw of the market that no training seed uses, deterministic actions."""
        return score(self.market, agent, seed=1_000_000 + seed)


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
    return Preset("regime", oracle_market("regime", **constants), trading_config(), 800_000)


def regime_hard() -> Preset:
    """A drift of 15 bps that switches once in a hundred bars."""
    market = oracle_market("regime", drift_bps=15.0, switch_probability=0.01)
    return Preset("regime_hard", market, trading_config(gamma=0.95), 2_000_000)


def signal(**constants: Any) -> Preset:
    """An AR(1) signal is seen; costs decide when to follow it."""
    return Preset("signal", oracle_market("signal", **constants), trading_config(), 800_000)


def noise(**constants: Any) -> Preset:
    """Nothing to earn: the best is not to trade. The critics take more of the gradient, so less luck is learned."""
    return Preset("noise", oracle_market("noise", **constants), trading_config(vf_coef=0.5), 800_000)


def pairs(**constants: Any) -> Preset:
    """Two cointegrated assets on shared cash."""
    return Preset("pairs", oracle_market("pairs", **constants), trading_config(), 800_000)


def crash(alpha: float = 0.05, cvar_limit: float | None = -0.04, **constants: Any) -> Preset:
    """Carry with rare jumps: all in without a limit; with one, about as much as a single jump may cost.

    Returns of neighbouring bars are independent, so short traces serve both streams, and one in alpha episodes says
    something of the tail, so rollouts are long. The price of the limit starts low: first learn what can be earned.
    """
    limited = {"mode": "episode", "alpha": alpha, "cvar_limit": cvar_limit, "dual_init": 0.3}
    config = trading_config(
        n_steps=125,
        gamma=0.99,
        gae_lambda=0.5,
        vf_coef=0.5,
        critic={"twin": False, "n_quantiles": 16},
        risk={"mode": "none"} if cvar_limit is None else limited,
    )
    kwargs = {"memory": "none", "net_arch": [32, 32], "log_std_init": -1.0, "log_std_end": -3.5}
    return Preset("crash", oracle_market("crash", **constants), config, 3_200_000, n_envs=128, policy_kwargs=kwargs)


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
