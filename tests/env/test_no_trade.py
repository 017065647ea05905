"""No-trade windows: which bars lie in one, and that every account keeps to them."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from random_markets import random_bars

from tailguard.env import AccountRules, Costs, EnvConfig, TradingVecEnv, follow, replay, sequential
from tailguard.env.no_trade import inside
from tailguard.errors import ConfigError

WEEK = np.datetime64("2024-01-01T00:00", "ms") + np.arange(7 * 24 * 2) * np.timedelta64(30, "m")  # from a Monday on
HOUR = np.tile(np.arange(48) / 2, 7)
DAY = np.repeat(np.arange(7), 48)


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ("09:30-16:00", (HOUR >= 9.5) & (HOUR < 16)),
        ("22:00-01:30", (HOUR >= 22) | (HOUR < 1.5)),
        ("20:00-24:00", HOUR >= 20),
        ("00:00-24:00", HOUR >= 0),
        ("Fri 20:00-Sun 23:00", (DAY + HOUR / 24 >= 4 + 20 / 24) & (DAY + HOUR / 24 < 6 + 23 / 24)),
        ("sun 22:00-mon 02:00", ((DAY == 6) & (HOUR >= 22)) | ((DAY == 0) & (HOUR < 2))),
        ("Sat 00:00-Sun 24:00", DAY >= 5),
    ],
)
def test_a_window_holds_its_start_and_not_its_end(window: str, expected: np.ndarray) -> None:
    assert_array_equal(inside(WEEK, [window]), expected)
    later = WEEK + np.timedelta64(7 * 24 * 52, "h")  # the same a year of weeks later
    assert_array_equal(inside(later, [window]), expected)


def test_windows_add_up() -> None:
    assert_array_equal(inside(WEEK, ["09:00-10:00", "Sat 00:00-Sun 24:00"]), ((HOUR >= 9) & (HOUR < 10)) | (DAY >= 5))


@pytest.mark.parametrize(
    "window", ["", "9-10", "09:00", "09:00-09:00", "25:00-26:00", "24:30-25:00", "09:60-10:00", "Fri 09:00-10:00", "x"]
)
def test_anything_else_is_refused_with_an_example(window: str) -> None:
    with pytest.raises(ConfigError, match="is not a time window"):
        AccountRules(no_trade_windows=(window,))


def test_decisions_followed_afterwards_meet_the_same_windows_as_in_the_environment() -> None:
    bars = random_bars(300)
    rules = AccountRules(no_trade_windows=("06:00-12:00", "Sat 00:00-Sun 24:00"))
    config = EnvConfig(episode_length=None, random_start=False, account=rules)
    env = TradingVecEnv(bars, n_envs=1, config=config)
    targets = np.random.default_rng(0).uniform(-0.5, 0.5, (250, 2)).astype(np.float32)
    rows = iter(targets)
    lived = replay(sequential(env, 10, 261), lambda seen: next(rows)[None])
    told = follow(bars, targets, first=10, costs=Costs(), account=rules)
    assert_array_equal(told.equity, lived.equity)
    assert_array_equal(told.weights[:-1], lived.weights[:-1])  # the last episode is over: its account starts anew
    closed = inside(bars.ts, rules.no_trade_windows)[11:261]
    assert closed.any()
    assert not told.turnover[closed].any()
    assert told.turnover[~closed].all()
    free = follow(bars, targets, first=10, costs=Costs(), account=rules.replace(no_trade_windows=()))
    assert free.turnover[closed].all()
