"""Dynamic programming for a `Chain`: the best long-run reward per step, the policy, and what it earns.

For every information state the best policy is a band: below `low` buy up to it, above `high` sell down to it, between
them do nothing. Value iteration gives bounds on the reward per step that hold at every sweep (the smallest and largest
change of value), so it stops when the bounds meet. The grids are then refined until the answer no longer moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tailguard.errors import TailguardError
from tailguard.market.oracles.chain import Chain, Sizes

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

OUTER = 2
"""Weights of the grid beyond 1 on each side: a held weight drifts out of [-1, 1], a target does not."""


@dataclass(frozen=True)
class Band:
    """Do nothing while the weight held is between `low` and `high`; both depend on the information state."""

    grid: Array  # (X,)
    low: Array  # (X,)
    high: Array  # (X,)

    def __call__(self, state: Array, held: Array) -> Array:
        """Target weight for information states and weights held, any equal shapes."""
        return np.clip(held, np.interp(state, self.grid, self.low), np.interp(state, self.grid, self.high))


@dataclass(frozen=True)
class Solution:
    """The optimum of a chain on grids of some size."""

    band: Band
    reward_per_step: float
    bounds: tuple[float, float]  # on the grid, the reward per step lies between them
    value: Array  # (X, H) of information state and weight held, up to a constant
    weights: Array  # (H,)
    sizes: Sizes


def weight_grid(n: int) -> Array:
    """n weights on [-1, 1] and `OUTER` more on each side."""
    step = 2.0 / (n - 1)
    inner = np.linspace(-1.0, 1.0, n)
    beyond = 1.0 + step * np.arange(1, OUTER + 1)
    return np.concatenate([-beyond[::-1], inner, beyond])


class Bar:
    """One bar of a chain while a certain weight is held in each state (x, h) of the grids: growth, and what follows.

    Where a value function is read afterwards does not depend on it, so its expectation is two sparse products.
    """

    def __init__(self, chain: Chain, weights: Array, holding: Array) -> None:
        """holding: (X, H) the weight held for the bar in each state; weights: (H,)"""
        self.log_growth, self.log_growth_squared = np.empty(holding.shape), np.empty(holding.shape)  # means, (X, H)
        self._blocks = []
        first, mix = next_states(chain)
        for begin in range(0, len(holding), 16):  # of states: few enough to stay in a processor's cache
            rows = slice(begin, begin + 16)
            prob, held = chain.prob[rows], holding[rows, :, None]
            gain = np.maximum(1.0 + held * chain.ret[rows, None, :], 1e-3)  # (x, H, K), as the reward's floor
            log_gain, after = np.log(gain), held * chain.growth[rows, None, :] / gain
            self.log_growth[rows] = np.einsum("xk,xhk->xh", prob, log_gain)
            self.log_growth_squared[rows] = np.einsum("xk,xhk->xh", prob, log_gain**2)
            state = _mix_of_states(first[rows], prob[..., None] * mix[rows], len(chain.grid))
            self._blocks.append((rows, state, _interpolation(after, weights)))

    def expect(self, value: Array) -> Array:
        """(X, H) expectation of a value function (X, H) after the bar."""
        out = np.empty(value.shape)
        for rows, state, weight in self._blocks:
            out[rows] = (weight @ (state @ value).ravel()).reshape(-1, value.shape[1])
        return out


def _mix_of_states(first: Ints, mix: Array, n_states: int) -> Any:
    """Sparse (x K, X): for each case (x, K) the sum over four states from `first` on, times mix (x, K, 4)."""
    from scipy import sparse  # takes a tenth of a second to import, and few ask for an optimum

    columns, ends = (first[..., None] + np.arange(4)).astype(np.int32), np.arange(0, mix.size + 1, 4, dtype=np.int32)
    return sparse.csr_array((mix.ravel(), columns.ravel(), ends), shape=(first.size, n_states))


def _interpolation(after: Array, weights: Array) -> Any:
    """Sparse (x H, x K H): for each state (x, H) the sum over cases of values at the weights held `after` (x, H, K)."""
    from scipy import sparse

    n_states, n_weights, n_cases = after.shape
    below, part = _places(after, weights)
    first = np.arange(n_states * n_cases).reshape(n_states, 1, n_cases) * n_weights + below
    columns = np.stack([first, first + 1], axis=-1).astype(np.int32)
    shares = np.stack([1.0 - part, part], axis=-1)
    ends = np.arange(0, 2 * after.size + 1, 2 * n_cases, dtype=np.int32)
    shape = n_states * n_weights, n_states * n_cases * n_weights
    return sparse.csr_array((shares.ravel(), columns.ravel(), ends), shape=shape)


def _places(held: Array, weights: Array) -> tuple[Ints, Array]:
    """Grid weight below each held one, and how far between it and the next one.

    Beyond the grid it is the last pair, so a value goes on along its last slope, which is the cost of coming back.
    """
    place = (held - weights[0]) / (weights[1] - weights[0])
    below = np.clip(place.astype(np.int64), 0, len(weights) - 2)
    return below, place - below


def next_states(chain: Chain) -> tuple[Ints, Array]:
    """First of the four grid states around each next one (X, K), and their shares (X, K, 4): cubic interpolation.

    Values are smooth in the information state (noise smooths them), so four points are worth many more of two.
    States beyond the grid count as its edge.
    """
    grid = chain.grid
    after = np.clip(chain.after, grid[0], grid[-1])
    first = np.clip(np.searchsorted(grid, after, side="right") - 2, 0, len(grid) - 4).astype(np.int64)
    points = grid[first[..., None] + np.arange(4)]
    mix = np.ones(points.shape)
    for i in range(4):
        for j in range(4):
            if i != j:
                mix[..., i] *= (after - points[..., j]) / (points[..., i] - points[..., j])
    return first, mix


def best_weight(held: Array, weights: Array, slope: float) -> Array:
    """(X,) the weight in [-1, 1] where held + slope * weight (X, H) is largest, refined by the parabola through it."""
    inner = slice(OUTER, len(weights) - OUTER)
    score = held[:, inner] + slope * weights[inner]
    states, best = np.arange(len(score)), score.argmax(axis=1)
    middle = np.clip(best, 1, score.shape[1] - 2)
    down = score[states, middle] - score[states, middle - 1]
    up = score[states, middle + 1] - score[states, middle]
    peaked = (best == middle) & (down > up)
    offset = 0.5 * (down + up) / np.where(peaked, down - up, 1.0)
    return np.asarray(weights[inner][best] + np.where(peaked, offset, 0.0) * (weights[1] - weights[0]))


def trade(held: Array, weights: Array, cost: float) -> tuple[Array, Array, Array]:
    """From values of holding each weight (X, H) to the band, low and high (X,), and values before trading (X, H)."""
    low = best_weight(held, weights, -cost)
    high = np.maximum(low, best_weight(held, weights, cost))
    target, kept = traded(weights, cost, low, high)
    below, part = _places(target / kept, weights)
    value, above = (np.take_along_axis(held, below + i, axis=1) for i in (0, 1))
    return low, high, np.log(kept) + (value + part * (above - value))


def traded(weights: Array, cost: float, low: Array, high: Array) -> tuple[Array, Array]:
    """(X, H) weight that a band leads to from each held one, and the part of equity that the trade leaves."""
    target = np.minimum(np.maximum(weights, low[:, None]), high[:, None])
    return target, 1.0 - cost * np.abs(target - weights)


def solve(chain: Chain, sizes: Sizes, *, warm: Solution | None = None, max_sweeps: int = 20_000) -> Solution:
    """Value iteration until the bounds on the reward per step are within 2e-4 of it (or within 2e-9)."""
    weights = weight_grid(sizes.weights)
    shape = len(chain.grid), len(weights)
    bar = Bar(chain, weights, np.broadcast_to(weights, shape))
    value = np.zeros(shape) if warm is None else _resampled(warm, chain.grid, weights)
    for _ in range(max_sweeps):
        low, high, new = trade(bar.log_growth + bar.expect(value), weights, chain.cost)
        change = new - value
        least, most = float(change.min()), float(change.max())
        value = new - new[shape[0] // 2, shape[1] // 2]
        if most - least <= max(2e-4 * abs(least + most), 2e-9):
            return Solution(Band(chain.grid, low, high), 0.5 * (least + most), (least, most), value, weights, sizes)
    raise TailguardError(
        f"The optimum did not settle in {max_sweeps} sweeps (bounds {least:.3e} .. {most:.3e} per step). The market "
        f"mixes too slowly for these constants; use a larger switch probability or a smaller persistence."
    )


def _resampled(solution: Solution, grid: Array, weights: Array) -> Array:
    """A value function on another grid, to start from."""
    rows = np.stack([np.interp(weights, solution.weights, row) for row in solution.value])
    return np.stack([np.interp(grid, solution.band.grid, column) for column in rows.T], axis=1)


def refine(
    make_chain: Callable[[Sizes], Chain], *, rtol: float = 2e-3, atol: float = 1e-7, max_levels: int = 3
) -> tuple[Chain, Solution]:
    """Halve every grid step until the reward per step moves by less than rtol of itself (or atol)."""
    sizes = Sizes()
    chain = make_chain(sizes)
    solution = solve(chain, sizes)
    for _ in range(max_levels):
        sizes = sizes.finer()
        chain = make_chain(sizes)
        finer = solve(chain, sizes, warm=solution)
        moved = abs(finer.reward_per_step - solution.reward_per_step)
        solution = finer
        if moved <= max(rtol * abs(finer.reward_per_step), atol):
            return chain, solution
    raise TailguardError(
        f"The optimum still moves by {moved:.2e} per step on the finest grid, {sizes}. "
        f"These constants need finer grids."
    )


def long_run(chain: Chain, sizes: Sizes, band: Band, *, max_sweeps: int = 20_000) -> tuple[float, float]:
    """Long-run means per step of the squared reward and of the weight traded under a band.

    The band may come from a finer grid.
    """
    weights = weight_grid(sizes.weights)
    low, high = (np.interp(chain.grid, band.grid, edge) for edge in (band.low, band.high))
    target, kept = traded(weights, chain.cost, low, high)
    bar, paid = Bar(chain, weights, target / kept), np.log(kept)
    square = paid**2 + 2.0 * paid * bar.log_growth + bar.log_growth_squared  # mean of (paid + log growth)^2

    def mean(payoff: Array) -> float:
        value = np.zeros(payoff.shape)
        for _ in range(max_sweeps):
            new = payoff + bar.expect(value)
            change = new - value
            least, most = float(change.min()), float(change.max())
            value = new - new[len(chain.grid) // 2, len(weights) // 2]
            if most - least <= max(5e-4 * abs(least + most), 1e-9):
                return 0.5 * (least + most)
        raise TailguardError(f"The long-run mean did not settle in {max_sweeps} sweeps ({least:.3e} .. {most:.3e}).")

    return mean(square), mean(np.abs(target - weights))


def episode_value(chain: Chain, sizes: Sizes, n_steps: int) -> float:
    """Best expected sum of rewards over n_steps that start flat, by backward induction on the same grids."""
    weights = weight_grid(sizes.weights)
    value = np.zeros((len(chain.grid), len(weights)))
    bar = Bar(chain, weights, np.broadcast_to(weights, value.shape))
    for done in range(1, n_steps + 1):
        _, _, new = trade(bar.log_growth + bar.expect(value), weights, chain.cost)
        change, value = new - value, new
        if np.ptp(change) <= max(2e-4 * abs(float(change.mean())), 1e-10):  # every further step adds the same
            value = value + (n_steps - done) * float(change.mean())
            break
    return float(chain.start @ value[:, len(weights) // 2])
