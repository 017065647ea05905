"""What every oracle market offers: bars, the observation, the optimum and the policy that reaches it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from tailguard.configuration import Config, NonNegativeFloat
from tailguard.errors import ConfigError
from tailguard.kernels.scans import reverse_scan
from tailguard.market.bars import Bars
from tailguard.market.oracles import solver
from tailguard.market.oracles.chain import Chain, Sizes

Array = npt.NDArray[np.float64]

BPS = 1e-4
HOUR = np.timedelta64(3_600_000, "ms")
BEGIN = np.datetime64("2000-01-01T00:00:00", "ms")


@dataclass(frozen=True)
class Optimum:
    """What the best policy earns in the long run, per bar and net of costs."""

    reward_per_step: float
    """Mean of the reward, ln(E[t+1] / E[t])."""
    reward_std: float
    """Standard deviation of the reward of one bar."""
    turnover_per_step: float
    """Mean traded notional over equity, all assets."""
    bounds: tuple[float, float]
    """The reward per step on the grid used lies between them."""

    @property
    def sharpe_per_step(self) -> float:
        """Mean over standard deviation of the reward of one bar; 0 where the best is not to trade."""
        return self.reward_per_step / self.reward_std if self.reward_std > 0 else 0.0

    def sharpe(self, bars_per_year: float) -> float:
        """Annualised."""
        return self.sharpe_per_step * sqrt(bars_per_year)


@dataclass(frozen=True)
class Path:
    """A draw of a market: simple returns (T, A), and what generated them, (T,) by name."""

    returns: Array
    hidden: dict[str, Array]


class OptimalPolicy:
    """SB3's `predict` over the observations of `tailguard.env.oracle_env`; the state is whatever it must remember.

    Observations hold the features of the market, then the weights held: the first agent state of the environment.
    """

    def predict(
        self,
        observation: npt.NDArray[Any],
        state: Any = None,
        episode_start: npt.NDArray[Any] | None = None,
        deterministic: bool = True,
    ) -> tuple[npt.NDArray[np.float32], Any]:
        raise NotImplementedError


class OracleMarket(Config):
    """A market whose constants are its fields and whose best policy is known.

    Returns are simple returns, the open of a bar is the close before it (so a fill costs nothing but the cost), and the
    cost is paid per unit traded. Bars are an hour long, which only annualised figures notice.
    """

    kind: ClassVar[str]
    symbols: ClassVar[tuple[str, ...]] = ("X",)
    feature_names: ClassVar[tuple[str, ...]]
    look_back: ClassVar[int] = 1
    gross_cap: ClassVar[float] = 1.0

    cost_bps: NonNegativeFloat = 5.0
    """Paid per unit of notional traded."""

    @abstractmethod
    def path(self, n_bars: int, seed: int) -> Path:
        """Draw returns; the same seed draws the same."""

    @abstractmethod
    def features(self, bars: Bars) -> npt.NDArray[np.float32]:
        """(T, A, F) what the agent is shown, of the order of one."""

    @abstractmethod
    def policy(self) -> OptimalPolicy:
        """The best policy, as a function of observations and memory."""

    @abstractmethod
    def chain(self, sizes: Sizes) -> Chain:
        """The decision problem on grids of a given size."""

    @property
    def optimum(self) -> Optimum:
        """Reward, Sharpe and turnover of the best policy; computed once per set of constants."""
        return _optimum(self)

    def episode_reward(self, n_steps: int) -> float:
        """Best expected sum of rewards of an episode of n_steps that starts flat and knows nothing yet."""
        chain, solution = solved(self)
        return solver.episode_value(chain, solution.sizes, n_steps)

    def bars(self, n_bars: int, seed: int = 0) -> Bars:
        """Bars of one draw. What an agent may see and prices do not tell is an extra of the bars."""
        path = self.path(n_bars, seed)
        level = np.cumsum(np.log1p(path.returns), axis=0)
        if np.abs(level).max() > 600.0:
            raise ConfigError(
                f"n_bars={n_bars} takes the price beyond what a float holds. Use fewer bars and more seeds."
            )
        close = 100.0 * np.exp(level)
        open_ = np.vstack([np.full((1, close.shape[1]), 100.0), close[:-1]])
        shown = {name: np.broadcast_to(path.hidden[name][:, None], close.shape) for name in self.extras()}
        return Bars.from_arrays(
            BEGIN + np.arange(n_bars) * HOUR,
            self.symbols,
            open_,
            np.maximum(open_, close),
            np.minimum(open_, close),
            close,
            np.full(close.shape, 1e6),
            extras=shown,
        )

    def extras(self) -> tuple[str, ...]:
        """Names of `path(...).hidden` that are not hidden from the agent."""
        return ()

    def rng(self, seed: int) -> np.random.Generator:
        """Markets of different kinds draw independently from the same seed."""
        return np.random.default_rng([seed, *self.kind.encode()])

    @property
    def cost(self) -> float:
        return self.cost_bps * BPS


def last_returns(bars: Bars) -> Array:
    """(T, A) simple return of each bar; 0 for the first."""
    change = np.zeros(bars.close.shape)
    change[1:] = bars.close[1:] / bars.close[:-1] - 1.0
    return change


def autoregression(start: float, persistence: float, shocks: Array) -> Array:
    """x[0] = start, x[t] = persistence * x[t-1] + shocks[t]."""
    terms, carried = shocks[::-1, None].copy(), np.full((len(shocks), 1), persistence)
    terms[-1], carried[-1] = start, 0.0
    return reverse_scan(terms, carried, np.zeros(1))[::-1, 0]


@lru_cache(maxsize=64)
def solved(market: OracleMarket) -> tuple[Chain, solver.Solution]:
    """Refined until it no longer moves; kept, because training and reports ask again and again."""
    return solver.refine(market.chain)


@lru_cache(maxsize=64)
def _optimum(market: OracleMarket) -> Optimum:
    _, solution = solved(market)
    mean = solution.reward_per_step
    legs = len(market.symbols)
    sizes = Sizes(states=161, weights=31, nodes=31)  # a switch of position is sharp in the state, coarse in the weight
    square, traded = solver.long_run(market.chain(sizes), sizes, solution.band)
    return Optimum(mean, sqrt(max(square - mean**2, 0.0)), legs * traded, solution.bounds)
