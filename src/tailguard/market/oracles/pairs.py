"""Two assets whose log prices differ by a mean-reverting spread, traded from one pot of cash."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tailguard.configuration import PositiveFloat
from tailguard.market.bars import Bars
from tailguard.market.oracles.base import OptimalPolicy, OracleMarket, Path, autoregression, solved
from tailguard.market.oracles.chain import Chain, Sizes, gaussian, on_grid, product_rule
from tailguard.market.oracles.solver import Band

Array = npt.NDArray[np.float64]


class PairsMarket(OracleMarket):
    """Log prices are a common random walk plus and minus half a stationary AR(1) spread s = ln A - ln B.

    The walk's drift cancels the convexity of the exponential, so that neither asset has a mean return of its own:
    E[R_A | s] = exp(-(1 - phi) s / 2) - 1, and the opposite sign for B. Both weights are in [-1, 1], gross up to 2.
    """

    kind = "pairs"
    symbols = ("A", "B")
    feature_names = ("spread",)
    look_back = 0
    gross_cap = 2.0

    half_life_bars: PositiveFloat = 20.0
    """Bars in which the expected spread halves."""
    spread_std: Annotated[float, Field(gt=0.0, le=0.5)] = 0.02
    """Stationary standard deviation of the log spread."""
    volatility: Annotated[float, Field(ge=0.0, le=0.1)] = 0.01
    """Standard deviation of the common move of a bar."""

    @property
    def persistence(self) -> float:
        return float(0.5 ** (1.0 / self.half_life_bars))

    @property
    def shock_std(self) -> float:
        return float(self.spread_std * np.sqrt(1.0 - self.persistence**2))

    def leg_returns(self, spread: Array, next_spread: Array, common: Array) -> tuple[Array, Array]:
        """Simple returns of A and B from one spread to the next, with a standard normal common move."""
        drift = -0.5 * self.volatility**2 - 0.125 * self.shock_std**2
        both, apart = drift + self.volatility * common, 0.5 * (next_spread - spread)
        return np.expm1(both + apart), np.expm1(both - apart)

    def path(self, n_bars: int, seed: int) -> Path:
        rng = self.rng(seed)
        shocks = rng.normal(0.0, self.shock_std, n_bars + 1)
        spread = autoregression(0.0, self.persistence, shocks)  # prices start equal, so the spread starts at 0
        legs = self.leg_returns(spread[:-1], spread[1:], rng.normal(size=n_bars))
        return Path(np.stack(legs, axis=1), {"spread": spread[1:]})

    def features(self, bars: Bars) -> npt.NDArray[np.float32]:
        """The spread in standard deviations, seen from each leg: positive means this leg is dear."""
        spread = np.log(bars.close[:, 0] / bars.close[:, 1]) / self.spread_std
        return np.stack([spread, -spread], axis=1).astype(np.float32)[:, :, None]

    def chain(self, sizes: Sizes) -> Chain:
        """Weight d means d of A and -d of B, so a unit traded costs twice and returns R_A - R_B."""
        grid = np.linspace(-5.5, 5.5, sizes.states)
        (shock, common), prob = product_rule(gaussian(sizes.nodes), gaussian(5))
        spread = self.spread_std * grid[:, None]
        after = self.persistence * spread + self.shock_std * shock
        a, b = self.leg_returns(np.broadcast_to(spread, after.shape), after, np.broadcast_to(common, after.shape))
        x, p = gaussian(61)
        return Chain(
            grid,
            np.broadcast_to(prob, a.shape).copy(),
            a - b,
            1.0 + 0.5 * (a + b),
            after / self.spread_std,
            on_grid(grid, x, p),
            2.0 * self.cost,
        )

    def policy(self) -> OptimalPolicy:
        return PairsPolicy(solved(self)[1].band)


class PairsPolicy(OptimalPolicy):
    """Move both legs by what half their difference is off its band; what they have in common is left to drift."""

    def __init__(self, band: Band) -> None:
        self.band = band

    def predict(
        self,
        observation: npt.NDArray[Any],
        state: Any = None,
        episode_start: npt.NDArray[Any] | None = None,
        deterministic: bool = True,
    ) -> tuple[npt.NDArray[np.float32], Any]:
        spread, held = observation[:, 0].astype(np.float64), observation[:, 2:4].astype(np.float64)
        apart = 0.5 * (held[:, 0] - held[:, 1])
        shift = self.band(spread, apart) - apart
        target = np.clip(held + np.stack([shift, -shift], axis=1), -1.0, 1.0)
        return target.astype(np.float32), state
