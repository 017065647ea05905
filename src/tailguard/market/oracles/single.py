"""Markets of one asset: an observed signal, a hidden regime, and nothing at all."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tailguard.market.bars import Bars
from tailguard.market.oracles.base import (
    BPS,
    OptimalPolicy,
    Optimum,
    OracleMarket,
    Path,
    autoregression,
    last_returns,
    solved,
)
from tailguard.market.oracles.chain import Chain, Sizes, gaussian, on_grid, product_rule
from tailguard.market.oracles.solver import Band

Array = npt.NDArray[np.float64]
Volatility = Annotated[float, Field(gt=0.0, le=0.1)]


class SignalMarket(OracleMarket):
    """An observed AR(1) signal z of unit variance moves the next return:

    R[t+1] = volatility * (sqrt(r_squared) * z[t] + sqrt(1 - r_squared) * noise[t+1]).
    """

    kind = "signal"
    feature_names = ("signal",)
    look_back = 0

    persistence: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """z[t+1] = persistence * z[t] + shock."""
    r_squared: Annotated[float, Field(ge=0.0, le=1.0)] = 0.02
    """Share of the return's variance that the signal explains."""
    volatility: Volatility = 0.01
    """Standard deviation of a return."""

    def path(self, n_bars: int, seed: int) -> Path:
        rng = self.rng(seed)
        shocks = rng.normal(0.0, np.sqrt(1.0 - self.persistence**2), n_bars)
        signal = autoregression(float(rng.normal()), self.persistence, shocks)
        noise = rng.normal(size=n_bars)
        known = np.concatenate([[0.0], signal[:-1]])  # the return of bar t answers the signal of t - 1
        returns = self.volatility * (np.sqrt(self.r_squared) * known + np.sqrt(1.0 - self.r_squared) * noise)
        return Path(returns[:, None], {"signal": signal})

    def extras(self) -> tuple[str, ...]:
        return ("signal",)

    def features(self, bars: Bars) -> npt.NDArray[np.float32]:
        return bars.extras["signal"].astype(np.float32)[:, :, None]

    def chain(self, sizes: Sizes) -> Chain:
        grid = np.linspace(-5.5, 5.5, sizes.states)
        (shock, noise), prob = product_rule(gaussian(sizes.nodes), gaussian(5))
        mean = self.volatility * np.sqrt(self.r_squared) * grid[:, None]
        ret = mean + self.volatility * np.sqrt(1.0 - self.r_squared) * noise
        after = self.persistence * grid[:, None] + np.sqrt(1.0 - self.persistence**2) * shock
        x, p = gaussian(61)
        shape = (len(grid), len(prob))
        return Chain(grid, np.broadcast_to(prob, shape).copy(), ret, 1.0 + ret, after, on_grid(grid, x, p), self.cost)

    def policy(self) -> OptimalPolicy:
        return SignalPolicy(solved(self)[1].band)


class SignalPolicy(OptimalPolicy):
    """A band around the weight that the signal asks for."""

    def __init__(self, band: Band) -> None:
        self.band = band

    def predict(
        self,
        observation: npt.NDArray[Any],
        state: Any = None,
        episode_start: npt.NDArray[Any] | None = None,
        deterministic: bool = True,
    ) -> tuple[npt.NDArray[np.float32], Any]:
        signal, held = observation[:, 0].astype(np.float64), observation[:, 1].astype(np.float64)
        return self.band(signal, held)[:, None].astype(np.float32), state


class RegimeMarket(OracleMarket):
    """A hidden state s = +1 or -1 sets the drift, and only returns are seen:

    R[t] = s[t] * drift + volatility * noise[t];  s changes sign with a small probability before every bar.
    """

    kind = "regime"
    feature_names = ("return",)

    drift_bps: Annotated[float, Field(gt=0.0)] = 25.0
    """Mean return of a bar in the good state; its negative in the bad one."""
    volatility: Volatility = 0.01
    switch_probability: Annotated[float, Field(gt=0.0, le=0.5)] = 0.02

    @property
    def drift(self) -> float:
        return self.drift_bps * BPS

    def path(self, n_bars: int, seed: int) -> Path:
        rng = self.rng(seed)
        switches = rng.uniform(size=n_bars) < self.switch_probability
        state = rng.choice([-1.0, 1.0]) * np.where(np.cumsum(switches) % 2 == 0, 1.0, -1.0)
        returns = state * self.drift + self.volatility * rng.normal(size=n_bars)
        return Path(returns[:, None], {"state": state})

    def features(self, bars: Bars) -> npt.NDArray[np.float32]:
        return (last_returns(bars) / self.volatility).astype(np.float32)[:, :, None]

    def predicted(self, log_odds: Array) -> Array:
        """Log-odds of the next bar's state from those of this bar's: certainty leaks by the switch probability."""
        q = self.switch_probability
        with np.errstate(over="ignore"):
            p = 1.0 / (1.0 + np.exp(-log_odds))
        p = q + (1.0 - 2.0 * q) * p
        return np.asarray(np.log(p / (1.0 - p)))

    def learned(self, log_odds: Array, returns: Array) -> Array:
        """Bayes: a return moves the log-odds by 2 * drift * return / variance; then the state may switch."""
        return self.predicted(log_odds + 2.0 * self.drift / self.volatility**2 * returns)

    def chain(self, sizes: Sizes) -> Chain:
        most = np.log((1.0 - self.switch_probability) / self.switch_probability)
        # decisions turn where the agent is least sure, so the grid is densest there
        grid = np.sinh(3.0 * np.linspace(-1.0, 1.0, sizes.states)) / np.sinh(3.0) * max(float(most), 1e-6)
        noise, weight = gaussian(2 * sizes.nodes + 1)
        up = 1.0 / (1.0 + np.exp(-grid))[:, None]
        prob = np.hstack([up * weight, (1.0 - up) * weight])
        ret = np.concatenate([self.drift + self.volatility * noise, -self.drift + self.volatility * noise])
        ret = np.broadcast_to(ret, prob.shape).copy()
        after = self.learned(np.broadcast_to(grid[:, None], ret.shape), ret)
        # the first observation shows one return, so an episode starts one update after knowing nothing
        middle = sizes.states // 2
        start = on_grid(grid, after[middle], prob[middle])
        return Chain(grid, prob, ret, 1.0 + ret, after, start, self.cost)

    def policy(self) -> OptimalPolicy:
        return RegimePolicy(self, solved(self)[1].band)


class RegimePolicy(OptimalPolicy):
    """Bayes filter and band. The state is the log-odds of the next bar's regime, (N,)."""

    def __init__(self, market: RegimeMarket, band: Band) -> None:
        self.market, self.band = market, band

    def predict(
        self,
        observation: npt.NDArray[Any],
        state: Any = None,
        episode_start: npt.NDArray[Any] | None = None,
        deterministic: bool = True,
    ) -> tuple[npt.NDArray[np.float32], Any]:
        returns, held = observation[:, 0] * self.market.volatility, observation[:, 1].astype(np.float64)
        belief = np.zeros(len(observation)) if state is None else np.asarray(state)
        if episode_start is not None:
            belief = np.where(episode_start, 0.0, belief)
        belief = self.market.learned(belief, returns.astype(np.float64))
        return self.band(belief, held)[:, None].astype(np.float32), belief


class NoiseMarket(OracleMarket):
    """Independent returns of mean zero: no position has an edge, and a position has costs and variance.

    Closed form: E ln(1 + w R) <= ln(1 + w E R) = 0 by Jensen, with equality only at w = 0. Anything earned is a leak.
    """

    kind = "noise"
    feature_names = ("return",)

    volatility: Volatility = 0.01

    def path(self, n_bars: int, seed: int) -> Path:
        return Path(self.volatility * self.rng(seed).normal(size=(n_bars, 1)), {})

    def features(self, bars: Bars) -> npt.NDArray[np.float32]:
        return (last_returns(bars) / self.volatility).astype(np.float32)[:, :, None]

    def chain(self, sizes: Sizes) -> Chain:
        noise, weight = gaussian(sizes.nodes)
        ret = np.tile(self.volatility * noise, (4, 1))
        return Chain(np.arange(4.0), np.tile(weight, (4, 1)), ret, 1.0 + ret, 0.0 * ret, np.eye(4)[0], self.cost)

    @property
    def optimum(self) -> Optimum:
        return Optimum(0.0, 0.0, 0.0, (0.0, 0.0))

    def episode_reward(self, n_steps: int) -> float:
        return 0.0

    def policy(self) -> OptimalPolicy:
        return NoTrade()


class NoTrade(OptimalPolicy):
    """Stay in cash."""

    def predict(
        self,
        observation: npt.NDArray[Any],
        state: Any = None,
        episode_start: npt.NDArray[Any] | None = None,
        deterministic: bool = True,
    ) -> tuple[npt.NDArray[np.float32], Any]:
        return np.zeros((len(observation), 1), dtype=np.float32), state
