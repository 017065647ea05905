"""Bars + features -> a batched trading environment: accounting, costs, rewards, observation. No torch of its own."""

from tailguard.env.accounting import AccountRules, limits_of, requested_weights
from tailguard.env.costs import Costs
from tailguard.env.gym_views import TradingEnv, TradingVectorEnv
from tailguard.env.oracle import OracleScore, oracle_env, score
from tailguard.env.replay import Replay, follow, replay, sequential
from tailguard.env.vec_env import EnvConfig, TradingVecEnv

__all__ = [
    "AccountRules",
    "Costs",
    "EnvConfig",
    "OracleScore",
    "Replay",
    "TradingEnv",
    "TradingVecEnv",
    "TradingVectorEnv",
    "follow",
    "limits_of",
    "oracle_env",
    "replay",
    "requested_weights",
    "score",
    "sequential",
]
