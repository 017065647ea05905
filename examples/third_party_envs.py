"""Trading environments of others, built on given prices, so that the doctor can look into them.

pip install gym-anytrading gym-trading-env
tailguard doctor --env examples.third_party_envs:anytrading
tailguard doctor --env examples.third_party_envs:trading_env
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
import pandas as pd

WINDOW = 10


def random_walk(n_bars: int = 2_000) -> Mapping[str, Any]:
    """Prices to trade on when none are given."""
    close = 100.0 * np.exp(np.cumsum(np.random.default_rng(0).normal(0.0, 0.01, n_bars)))
    opened = np.concatenate([[100.0], close[:-1]])
    high, low = np.maximum(opened, close), np.minimum(opened, close)
    return {"open": opened, "high": high, "low": low, "close": close, "volume": np.full(n_bars, 1e6)}


def anytrading(prices: Mapping[str, Any] | None = None) -> gym.Env[Any, Any]:
    """gym-anytrading's stocks-v0: a window of prices and their differences."""
    import gym_anytrading  # noqa: F401 (registers its environments)

    frame = pd.DataFrame(prices or random_walk()).rename(columns=str.capitalize)
    return gym.make("stocks-v0", df=frame, window_size=WINDOW, frame_bound=(WINDOW, len(frame)))


def trading_env(prices: Mapping[str, Any] | None = None) -> gym.Env[Any, Any]:
    """gym-trading-env's TradingEnv with two features of the current bar and fees of 0.01 %."""
    with warnings.catch_warnings():  # importing it turns warnings into errors
        import gym_trading_env  # noqa: F401 (registers its environments)

    frame = pd.DataFrame(prices or random_walk())
    frame.index = pd.date_range("2020-01-01", periods=len(frame), freq="h", name="date")
    frame["feature_close"] = frame["close"].pct_change()
    frame["feature_open"] = frame["close"] / frame["open"]
    frame = frame.dropna()
    return gym.make("TradingEnv", df=frame, positions=[-1, 0, 1], trading_fees=1e-4, initial_position=0, verbose=0)
