"""Price-space attacks: the bars an agent sees are moved by at most x bps, and its features are computed from them.

Each bar's four prices are multiplied by one factor within 1 - x and 1 + x, so a bar stays a possible bar. What was
shown once stays shown: the past of a feature is the past the agent has seen. Fills, account and clock are the truth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.env import TradingVecEnv
from tailguard.errors import ConfigError
from tailguard.market import Bars
from tailguard.ppo import DistributionalPPO
from tailguard.robustness.learned import STEPS, trained
from tailguard.robustness.play import Attacker, Moment, Victim

Array = NDArray[np.float64]
Features = Callable[[Bars], NDArray[Any]]
"""From bars to what the agent is shown of them, (T, A, F)."""

BPS = 1e-4


class ShownPrices:
    """What every environment has been shown of the bars: factors on the prices of the last bars."""

    def __init__(self, env: TradingVecEnv, features: Features, bps: float) -> None:
        self.env, self.features, self.size = env, features, bps * BPS
        self.window = env.look_back + 1
        self.factors = np.ones((env.num_envs, self.window, len(env.bars.symbols)))
        self.open = torch.from_numpy(env.attackable.astype(np.float32))

    def next_bar(self, starts: NDArray[np.bool_]) -> None:
        """The window moves on by one bar, whose prices are true until they are moved; before an episode all are."""
        self.factors = np.concatenate([self.factors[:, 1:], np.ones_like(self.factors[:, :1])], axis=1)
        self.factors[starts] = 1.0

    def seen(self, observations: Tensor, moves: Array) -> Tensor:
        """(N, C, F) observations with the newest bar moved by each of C candidates (N, C, A) within -1 and 1."""
        n, n_candidates = moves.shape[:2]
        factors = np.repeat(self.factors[:, None], n_candidates, axis=1)  # (N, C, W, A)
        factors[:, :, -1] = 1.0 + self.size * moves
        last = self.features_of(factors)  # (N, C, A * F)
        truth = observations.unsqueeze(1).expand(n, n_candidates, -1)
        moved = truth.clone()
        moved[..., : last.shape[-1]] = torch.from_numpy(last)
        return torch.where(self.open > 0.0, moved, truth)

    def features_of(self, factors: Array) -> NDArray[np.float32]:
        """Features of the newest bar of every window, all computed in one call on windows laid end to end."""
        n, n_candidates, window, n_assets = factors.shape
        rows = (self.env.t[:, None] - np.arange(window)[::-1])[:, None].repeat(n_candidates, axis=1)  # (N, C, W)
        values = np.asarray(self.features(moved_bars(self.env.bars, rows.reshape(-1), factors.reshape(-1, n_assets))))
        newest: NDArray[np.float32] = values.reshape(n, n_candidates, window, -1)[:, :, -1].astype(np.float32)
        newest[~np.isfinite(newest)] = 0.0
        return newest

    def settle(self, moves: Array) -> None:
        """The newest bar was shown like this (N, A), and stays so."""
        self.factors[:, -1] = 1.0 + self.size * moves


def moved_bars(bars: Bars, rows: NDArray[np.int64], factors: Array) -> Bars:
    """Rows of the bars, one after the other on a clock of their own, prices times factors (R, A)."""
    ts = bars.ts[0] + np.arange(len(rows)) * bars.step
    high, low, close = (values[rows] * factors for values in (bars.high, bars.low, bars.close))
    return Bars.from_arrays(
        ts,
        bars.symbols,
        bars.open[rows] * factors,
        high,
        low,
        close,
        bars.volume[rows],
        bars.tradable[rows],
        extras={name: values[rows] for name, values in bars.extras.items()},
        step=bars.step,
    )


class PriceAttack:
    """Moves the newest bar at every step: at random, or to the candidate that changes the action law most."""

    def __init__(self, agent: DistributionalPPO, shown: ShownPrices, seed: int, at_random: bool) -> None:
        self.victim, self.shown, self.at_random = Victim(agent), shown, at_random
        self.rng = np.random.default_rng(seed)
        n_assets = shown.factors.shape[-1]
        signs = np.array(np.meshgrid(*[[-1.0, 0.0, 1.0]] * min(n_assets, 3))).reshape(min(n_assets, 3), -1).T
        self.candidates = signs if n_assets <= 3 else np.concatenate([np.eye(n_assets), -np.eye(n_assets)])

    def __call__(self, moment: Moment) -> Tensor:
        self.shown.next_bar(moment.starts)
        n, n_assets = len(moment.starts), self.shown.factors.shape[-1]
        if self.at_random:
            moves = self.rng.uniform(-1.0, 1.0, (n, 1, n_assets))
            self.shown.settle(moves[:, 0])
            return self.shown.seen(moment.observations, moves)[:, 0]
        moves = np.broadcast_to(self.candidates, (n, *self.candidates.shape))
        seen = self.shown.seen(moment.observations, moves)
        best = self.furthest(moment, seen)
        chosen = np.arange(n)
        self.shown.settle(moves[chosen, best])
        return seen[chosen, best]

    @torch.no_grad()
    def furthest(self, moment: Moment, seen: Tensor) -> NDArray[np.int64]:
        """(N,) the candidate whose action law is furthest from the unharmed one."""
        found = []
        for c in range(seen.shape[1]):
            law, _ = self.victim.law(seen[:, c], moment.memory)
            found.append(self.victim.policy.action_head.divergence(moment.unharmed, law))
        best: NDArray[np.int64] = torch.stack(found).argmax(0).numpy()
        return best


class PriceLever:
    """One dimension per asset: how far the newest bar's prices are moved."""

    def __init__(self, shown: ShownPrices) -> None:
        self.shown, self.size = shown, shown.factors.shape[-1]

    def pull(self, moment: Moment, action: Tensor) -> Tensor:
        self.shown.next_bar(moment.starts)
        moves = action.numpy().astype(np.float64).clip(-1.0, 1.0)
        seen = self.shown.seen(moment.observations, moves[:, None])[:, 0]
        self.shown.settle(moves)
        return seen


def price_attack(
    name: str, agent: DistributionalPPO, bps: float, seed: int, steps: int = STEPS, features: Features | None = None
) -> Attacker:
    """The price-space attack of that name; `features` computes what the agent is shown from bars."""
    env: Any = agent.get_env()
    while env is not None and not isinstance(env, TradingVecEnv):
        env = getattr(env, "venv", None)
    if env is None or features is None or agent.obs_stats.normalizer is not None:
        raise ConfigError(
            f"The attack {name!r} moves the prices of bars, so it needs an agent that trades bars and the function "
            "that makes its features. Use random, critic, mad or learned for other environments."
        )
    shown = ShownPrices(env, features, bps)
    if name == "price-learned":
        return trained(agent, PriceLever(shown), seed, steps)
    return PriceAttack(agent, shown, seed, at_random=name == "price-random")
