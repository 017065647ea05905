"""Positive carry and rare jumps: the best growth takes the tail, the best under a CVaR limit does not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tailguard.configuration import NonNegativeFloat, PositiveInt
from tailguard.errors import ConfigError
from tailguard.market.bars import Bars
from tailguard.market.oracles import tail
from tailguard.market.oracles.base import BPS, OptimalPolicy, OracleMarket, Path, last_returns, solved
from tailguard.market.oracles.chain import Chain, Sizes, gaussian
from tailguard.market.oracles.single import Volatility
from tailguard.market.oracles.solver import Band

Array = npt.NDArray[np.float64]


class CrashMarket(OracleMarket):
    """Independent returns: R = carry + volatility * noise, and with a small probability a jump on top.

    X, the return of a risk period, is the sum of the rewards of an episode: ln(E_end / E_start).
    """

    kind = "crash"
    feature_names = ("return",)

    carry_bps: float = 4.0
    """Mean return of a bar without a jump."""
    volatility: Volatility = 0.003
    jump: Annotated[float, Field(gt=-0.9, lt=0.9)] = -0.08
    """Return that a jump adds."""
    jump_probability: Annotated[float, Field(ge=0.0, le=1.0)] = 0.002
    episode_length: PositiveInt = 250
    """Bars of a risk period."""
    cost_bps: NonNegativeFloat = 0.0

    @property
    def mean_return(self) -> float:
        return self.carry_bps * BPS + self.jump_probability * self.jump

    def path(self, n_bars: int, seed: int) -> Path:
        rng = self.rng(seed)
        jumps = rng.uniform(size=n_bars) < self.jump_probability
        returns = self.carry_bps * BPS + self.volatility * rng.normal(size=n_bars) + self.jump * jumps
        return Path(returns[:, None], {"jump": jumps.astype(np.float64)})

    def features(self, bars: Bars) -> npt.NDArray[np.float32]:
        """The last return in standard deviations, cut at 5: a jump would dwarf every other number."""
        return np.clip(last_returns(bars) / self.volatility, -5.0, 5.0).astype(np.float32)[:, :, None]

    def outcomes(self, nodes: int) -> tuple[Array, Array]:
        """Returns of one bar and their probabilities: Gaussian nodes without and with a jump."""
        noise, weight = gaussian(nodes)
        quiet = self.carry_bps * BPS + self.volatility * noise
        p = self.jump_probability
        return np.concatenate([quiet, quiet + self.jump]), np.concatenate([(1.0 - p) * weight, p * weight])

    def chain(self, sizes: Sizes) -> Chain:
        returns, prob = self.outcomes(sizes.nodes)
        ret = np.tile(returns, (4, 1))  # four equal states: the next bar does not depend on anything
        return Chain(np.arange(4.0), np.tile(prob, (4, 1)), ret, 1.0 + ret, 0.0 * ret, np.eye(4)[0], self.cost)

    def policy(self) -> OptimalPolicy:
        return SteadyPolicy(solved(self)[1].band)

    def period_law(self, weight: float) -> tuple[Array, Array, Array]:
        """The law of X when `weight` is restored at every bar: a mixture over the number of jumps.

        returns: probability, mean and standard deviation of each component. Given the number of jumps, X is a sum of
        many small independent terms, normal to the accuracy of its skewness (about 0.001).
        """
        returns, _ = self.outcomes(31)
        n = len(returns) // 2
        rebalance = self.cost * abs(weight) * (1.0 - weight) * np.abs(returns)  # drift of the weight, corrected
        growth = np.log1p(weight * returns) - rebalance
        weights = gaussian(31)[1]
        means = [float(weights @ part) for part in (growth[:n], growth[n:])]
        squares = [
            float(weights @ (part - mean) ** 2) for part, mean in zip((growth[:n], growth[n:]), means, strict=True)
        ]
        jumps = np.arange(self.episode_length + 1)
        chance = binomial(jumps, self.episode_length, self.jump_probability)
        keep = chance > 1e-15
        chance, jumps = chance[keep], jumps[keep]
        quiet = self.episode_length - jumps
        entry = np.log1p(-self.cost * abs(weight))
        return chance, entry + quiet * means[0] + jumps * means[1], np.sqrt(quiet * squares[0] + jumps * squares[1])

    def period_cvar(self, weight: float, alpha: float) -> float:
        """CVaR_alpha of X at a constant weight: the mean of its worst share alpha, in closed form."""
        from scipy.special import ndtr  # takes a tenth of a second to import, and few ask

        if weight == 0.0:
            return 0.0
        chance, mean, std = self.period_law(weight)
        low, high = float((mean - 12 * std).min()), float((mean + 12 * std).max())
        for _ in range(200):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if chance @ ndtr((middle - mean) / std) < alpha else (low, middle)
        z = (0.5 * (low + high) - mean) / std
        density = np.exp(-0.5 * z**2) / np.sqrt(2.0 * np.pi)
        return float(chance @ (mean * ndtr(z) - std * density) / alpha)

    def constant_weight(self, alpha: float, limit: float) -> ConstantWeight:
        """The best weight held all through the episode with CVaR_alpha(X) >= limit."""
        check_limit(alpha, limit)
        best = float(solved(self)[1].band.low[0])
        low, high = 0.0, best
        if self.period_cvar(best, alpha) < limit:
            for _ in range(60):
                middle = 0.5 * (low + high)
                low, high = (middle, high) if self.period_cvar(middle, alpha) >= limit else (low, middle)
            best = low
        chance, mean, _ = self.period_law(best)
        return ConstantWeight(best, float(chance @ mean), self.period_cvar(best, alpha))

    def cvar_limited(self, alpha: float = 0.05, limit: float = -0.04) -> TailOptimum:
        """The best policy of all, free to look at time and at X so far, with CVaR_alpha(X) >= limit."""
        check_limit(alpha, limit)
        return _cvar_limited(self, float(alpha), float(limit))


@dataclass(frozen=True)
class ConstantWeight:
    """One weight for the whole episode."""

    weight: float
    episode_reward: float
    """E[X]."""
    cvar: float
    """CVaR_alpha(X), closed form."""


@dataclass(frozen=True)
class TailOptimum:
    """The best policy under a CVaR limit."""

    policy: OptimalPolicy
    episode_reward: float
    """E[X], by dynamic programming."""
    reward_per_step: float
    cvar: float
    """CVaR_alpha(X), by dynamic programming."""
    threshold: float
    """nu, the alpha-quantile of X under the policy."""
    price: float
    """Reward given up per unit of CVaR at the limit; 0 when the limit does not bind."""


class SteadyPolicy(OptimalPolicy):
    """The same band at every bar."""

    def __init__(self, band: Band) -> None:
        self.band = band

    def predict(
        self,
        observation: npt.NDArray[Any],
        state: Any = None,
        episode_start: npt.NDArray[Any] | None = None,
        deterministic: bool = True,
    ) -> tuple[npt.NDArray[np.float32], Any]:
        held = observation[:, 1].astype(np.float64)
        return self.band(np.zeros_like(held), held)[:, None].astype(np.float32), state


class TailPolicy(OptimalPolicy):
    """Looks up time left, X so far and the weight held: columns 2, 3 and 1 of the observation."""

    def __init__(self, table: tail.Table, episode_length: int) -> None:
        self.table, self.episode_length = table, episode_length

    def predict(
        self,
        observation: npt.NDArray[Any],
        state: Any = None,
        episode_start: npt.NDArray[Any] | None = None,
        deterministic: bool = True,
    ) -> tuple[npt.NDArray[np.float32], Any]:
        seen = observation.astype(np.float64)
        left = np.rint(seen[:, 2] * self.episode_length).astype(np.int64)
        weight = self.table.weight(self.episode_length - left, seen[:, 3] / 100.0, seen[:, 1])
        return weight[:, None].astype(np.float32), state


def binomial(successes: npt.NDArray[np.int64], n: int, p: float) -> Array:
    """Probability of each number of successes in n trials."""
    from scipy.special import gammaln, xlog1py, xlogy

    failures = n - successes
    ways = gammaln(n + 1.0) - gammaln(successes + 1.0) - gammaln(failures + 1.0)
    return np.asarray(np.exp(ways + xlogy(successes, p) + xlog1py(failures, -p)))


def check_limit(alpha: float, limit: float) -> None:
    if not 0.0 < alpha <= 1.0:
        raise ConfigError(f"alpha={alpha} is a share of outcomes; use a number in (0, 1].")
    if limit >= 0.0:
        raise ConfigError(
            f"limit={limit}: not trading has a CVaR of 0 and nothing risky has more. Use a negative limit."
        )


@lru_cache(maxsize=16)
def _cvar_limited(market: CrashMarket, alpha: float, limit: float) -> TailOptimum:
    returns, prob = market.outcomes(5)
    answer = tail.solve(returns, prob, market.cost, market.episode_length, market.volatility, alpha, limit)
    return TailOptimum(
        TailPolicy(answer.table, market.episode_length),
        answer.mean,
        answer.mean / market.episode_length,
        answer.cvar,
        answer.table.threshold,
        answer.price,
    )
