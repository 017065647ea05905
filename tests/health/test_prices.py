"""Environments of others, built on prices we make: when they fill, what they show, what they charge."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from tailguard.doctor import chosen, examine, gym_patient
from tailguard.doctor.checks import Verdict
from tailguard.doctor.patient import Prices
from tailguard.doctor.prices import made_prices
from tailguard.env import EnvConfig, TradingEnv, TradingVecEnv
from tailguard.market import Bars


class Targets(gym.Env[Any, Any]):
    """Short, flat or long for one bar; healthy: seen at the close, filled at the next open, reward after costs."""

    observation_space: spaces.Space[Any] = spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space: spaces.Space[Any] = spaces.Discrete(3)
    fee, shown, delay = 1e-3, 0, 0  # what a trade costs, bars the observation is ahead, half bars the fill is late

    def __init__(self, prices: Prices | None = None) -> None:
        bars = prices or made_prices()
        self.path = np.stack([bars["open"], bars["close"]], 1).reshape(-1)
        self.n_bars = len(bars["close"])

    def seen(self) -> Any:
        return self.path[2 * (self.t + self.shown) : 2 * (self.t + self.shown) + 2].copy()

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.weight, self.equity = 3, 0.0, 1.0
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        target = float(action) - 1.0
        fill = 2 * self.t + 2 + self.delay
        cost = self.fee * abs(target - self.weight)
        reward = target * float(np.log(self.path[fill + 2] / self.path[fill])) - cost
        self.weight, self.t, self.equity = target, self.t + 1, self.equity * float(np.exp(reward))
        over = self.t + 4 >= self.n_bars
        return self.seen(), self.reward(reward, cost), False, over, {"equity": self.equity}

    def reward(self, net: float, cost: float) -> float:
        return net


class FilledAtTheCloseSeen(Targets):
    delay = -1


class FilledAtTheNextClose(Targets):
    delay = 1


class ShowsTomorrow(Targets):
    shown = 1


class Free(Targets):
    fee = 0.0


class RewardBeforeCosts(Targets):
    def reward(self, net: float, cost: float) -> float:
        return net + cost


class ScaledOnEverything(Targets):
    def seen(self) -> Any:
        return (super().seen() - self.path.mean()) / self.path.std()


class BuyAndSell(Targets):
    """0 holds, 1 buys, 2 sells, at the close already seen; money comes when a position is sold."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.entry: float | None = None
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        price, reward = float(self.path[2 * self.t + 1]), 0.0
        if action == 1 and self.entry is None:
            self.entry = price
        elif action == 2 and self.entry is not None:
            reward, self.entry = price - self.entry - 0.1, None
        self.t += 1
        return self.seen(), reward, False, self.t + 4 >= self.n_bars, {}


def our_own(prices: Prices | None = None) -> gym.Env[Any, Any]:
    """Our environment on given prices, seen through its Gymnasium view; episodes start at the first bar."""
    bars = prices or made_prices()
    n = len(bars["close"])
    ts = np.datetime64("2024-01-01") + np.arange(n) * np.timedelta64(1, "h")
    columns = {name: bars[name][:, None] for name in ("open", "high", "low", "close", "volume")}
    made = Bars.from_arrays(ts, ("X",), **columns, tradable=np.ones((n, 1), bool))
    features = np.log(made.close / made.open)[..., None].astype(np.float32)
    config = EnvConfig(episode_length=n - 2)
    return TradingEnv(TradingVecEnv(made, features, ("move",), n_envs=1, config=config, seed=0))


def verdict(make: Any, line: str) -> Verdict:
    return examine(gym_patient("foreign", make), chosen(only=line)).line(line).verdict


@pytest.mark.parametrize(
    ("make", "line", "says"),
    [
        (FilledAtTheCloseSeen, "prices/fills", "filled at the newest close in its own observation"),
        (BuyAndSell, "prices/fills", "filled at the newest close in its own observation"),
        (ShowsTomorrow, "prices/look_ahead", "half a bar later than the first one paid"),
        (ScaledOnEverything, "prices/look_ahead", "bars later than the first one paid"),
        (Free, "prices/costs", "cost nothing of the reward"),
        (RewardBeforeCosts, "prices/costs", "but the environment has costs: equity falls from"),
    ],
    ids=lambda case: getattr(case, "__name__", ""),
)
def test_a_fault_is_named(make: Any, line: str, says: str) -> None:
    found = verdict(make, line)
    assert found.status == "fail", found
    assert says in found.figure


@pytest.mark.parametrize("line", ["prices/look_ahead", "prices/fills", "prices/costs"])
@pytest.mark.parametrize("make", [Targets, FilledAtTheNextClose, our_own], ids=["open", "close", "our_own"])
def test_an_honest_environment_passes(make: Any, line: str) -> None:
    found = verdict(make, line)
    assert found.status == "pass", found


def test_what_cannot_be_looked_into_is_not_judged() -> None:
    patient = gym_patient("closed", lambda: Targets())
    assert {line.verdict.status for line in examine(patient, chosen(only="prices/")).lines} == {"n/a"}
