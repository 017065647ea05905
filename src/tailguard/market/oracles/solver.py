"""Dynamic programming for a `Chain`: the best long-run reward per step, the policy, and what it earns.

For every information state the best policy is a band: below `low` buy up to it, above `high` sell down to it, between
them do nothing. Value iteration gives bounds on the reward per step that hold at every sweep (the smallest and largest
change of value), so it stops when the bounds meet. The grids are then refined until the answer no longer moves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numba
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


class Moves(NamedTuple):
    """What one bar may bring from every state, K cases each, in the form that the sweeps take."""

    prob: Array  # (X, K)
    ret: Array  # (X, K) return of the asset
    growth: Array  # (X, K) of its price, and so of a weight held
    cell: Ints  # (X, K) first of the four grid states around the next one
    mix: Array  # (X, K, 4) their shares


def weight_grid(n: int) -> Array:
    """n weights on [-1, 1] and `OUTER` more on each side."""
    step = 2.0 / (n - 1)
    inner = np.linspace(-1.0, 1.0, n)
    beyond = 1.0 + step * np.arange(1, OUTER + 1)
    return np.concatenate([-beyond[::-1], inner, beyond])


@numba.njit(cache=True, nogil=True)
def _along(row: Array, h: float, first: float, step: float) -> float:
    """Linear; beyond the last weight the value goes on along its last slope, which is the cost of coming back."""
    place = (h - first) / step
    j = min(max(int(place), 0), len(row) - 2)
    return float(row[j] + (place - j) * (row[j + 1] - row[j]))


@numba.njit(cache=True, nogil=True)
def _lookup(table: Array, i: int, mix: Array, h: float, first: float, step: float) -> float:
    """Linear in the weight, a mix of the four states from i on in the information state."""
    place = (h - first) / step
    j = min(max(int(place), 0), table.shape[1] - 2)
    part = place - j
    total = 0.0
    for m in range(4):
        total += mix[m] * (table[i + m, j] + part * (table[i + m, j + 1] - table[i + m, j]))
    return total


@numba.njit(cache=True, nogil=True)
def _expect(value: Array, weights: Array, moves: Moves, out: Array) -> None:
    """out[x, b] = E[ln(1 + b R) + value(x', h')]: holding b for one bar and going on well."""
    prob, ret, growth, cell, mix = moves
    first, step = weights[0], weights[1] - weights[0]
    n_states, n_weights = out.shape
    for x in range(n_states):
        for j in range(n_weights):
            b = weights[j]
            total = 0.0
            for k in range(prob.shape[1]):
                gain = max(1.0 + b * ret[x, k], 1e-3)  # as the reward's floor
                h = b * growth[x, k] / gain
                total += prob[x, k] * (np.log(gain) + _lookup(value, cell[x, k], mix[x, k], h, first, step))
            out[x, j] = total


@numba.njit(cache=True, nogil=True)
def _peak(row: Array, weights: Array, slope: float, first: int, last: int) -> float:
    """Where row + slope * weight is largest among first .. last, refined by the parabola through the neighbours."""
    best = first
    for j in range(first, last + 1):
        if row[j] + slope * weights[j] > row[best] + slope * weights[best]:
            best = j
    if best in (first, last):
        return float(weights[best])
    down = row[best] - row[best - 1] + slope * (weights[best] - weights[best - 1])
    up = row[best + 1] - row[best] + slope * (weights[best + 1] - weights[best])
    if down - up <= 0.0:
        return float(weights[best])
    offset = 0.5 * (down + up) / (down - up)
    return float(weights[best] + offset * (weights[1] - weights[0]))


@numba.njit(cache=True, nogil=True)
def _improve(held: Array, weights: Array, cost: float, outer: int, low: Array, high: Array, value: Array) -> None:
    """From the value of holding (X, H) to the band of every state and the value before trading."""
    first, step = weights[0], weights[1] - weights[0]
    n_states, n_weights = held.shape
    for x in range(n_states):
        low[x] = _peak(held[x], weights, -cost, outer, n_weights - 1 - outer)
        high[x] = max(low[x], _peak(held[x], weights, cost, outer, n_weights - 1 - outer))
        for j in range(n_weights):
            target = min(max(weights[j], low[x]), high[x])
            kept = 1.0 - cost * abs(target - weights[j])
            value[x, j] = np.log(kept) + _along(held[x], target / kept, first, step)


SQUARED_REWARD, TURNOVER = range(2)  # payoffs


@numba.njit(cache=True, nogil=True)
def _evaluate(
    value: Array, weights: Array, moves: Moves, cost: float, low: Array, high: Array, payoff: int, out: Array
) -> None:
    """One sweep of policy evaluation; the payoff is the reward squared or the weight traded."""
    prob, ret, growth, cell, mix = moves
    first, step = weights[0], weights[1] - weights[0]
    n_states, n_weights = out.shape
    for x in range(n_states):
        for j in range(n_weights):
            target = min(max(weights[j], low[x]), high[x])
            traded = abs(target - weights[j])
            kept = 1.0 - cost * traded
            b = target / kept
            total = 0.0
            for k in range(prob.shape[1]):
                gain = max(1.0 + b * ret[x, k], 1e-3)  # as the reward's floor
                now = np.log(kept * gain) ** 2 if payoff == SQUARED_REWARD else traded
                h = b * growth[x, k] / gain
                total += prob[x, k] * (now + _lookup(value, cell[x, k], mix[x, k], h, first, step))
            out[x, j] = total


def _moves(chain: Chain) -> Moves:
    """The chain's cases; every next state is a mix of four grid states with cubic weights.

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
    return Moves(chain.prob, chain.ret, chain.growth, first, mix)


def solve(chain: Chain, sizes: Sizes, *, warm: Solution | None = None, max_sweeps: int = 20_000) -> Solution:
    """Value iteration until the bounds on the reward per step are within 2e-4 of it (or within 2e-9)."""
    weights = weight_grid(sizes.weights)
    n_states = len(chain.grid)
    moves = _moves(chain)
    value = np.zeros((n_states, len(weights))) if warm is None else _resampled(warm, chain.grid, weights)
    held, new = np.empty_like(value), np.empty_like(value)
    low, high = np.empty(n_states), np.empty(n_states)
    for _ in range(max_sweeps):
        _expect(value, weights, moves, held)
        _improve(held, weights, chain.cost, OUTER, low, high, new)
        change = new - value
        least, most = float(change.min()), float(change.max())
        value = new - new[n_states // 2, len(weights) // 2]
        if most - least <= max(2e-4 * abs(least + most), 2e-9):
            band = Band(chain.grid, low.copy(), high.copy())
            return Solution(band, 0.5 * (least + most), (least, most), value, weights, sizes)
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


def long_run(chain: Chain, sizes: Sizes, band: Band, payoff: int, *, max_sweeps: int = 20_000) -> float:
    """Long-run mean per step of a payoff under a band, which may come from a finer grid."""
    moves = _moves(chain)
    weights = weight_grid(sizes.weights)
    low, high = (np.interp(chain.grid, band.grid, edge) for edge in (band.low, band.high))
    value = np.zeros((len(chain.grid), len(weights)))
    new = np.empty_like(value)
    for _ in range(max_sweeps):
        _evaluate(value, weights, moves, chain.cost, low, high, payoff, new)
        change = new - value
        least, most = float(change.min()), float(change.max())
        value = new - new[len(chain.grid) // 2, new.shape[1] // 2]
        if most - least <= max(5e-4 * abs(least + most), 1e-9):
            return 0.5 * (least + most)
    raise TailguardError(f"The long-run mean did not settle in {max_sweeps} sweeps ({least:.3e} .. {most:.3e}).")


def episode_value(chain: Chain, sizes: Sizes, n_steps: int) -> float:
    """Best expected sum of rewards over n_steps that start flat, by backward induction on the same grids."""
    weights = weight_grid(sizes.weights)
    moves = _moves(chain)
    value = np.zeros((len(chain.grid), len(weights)))
    held = np.empty_like(value)
    low, high = np.empty(len(chain.grid)), np.empty(len(chain.grid))
    new = np.empty_like(value)
    for done in range(1, n_steps + 1):
        _expect(value, weights, moves, held)
        _improve(held, weights, chain.cost, OUTER, low, high, new)
        change = new - value
        value, new = new, value
        if np.ptp(change) <= max(2e-4 * abs(float(change.mean())), 1e-10):  # every further step adds the same
            value = value + (n_steps - done) * float(change.mean())
            break
    return float(chain.start @ value[:, len(weights) // 2])
