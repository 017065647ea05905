"""The best expected return of an episode under a limit on its CVaR, by dynamic programming on (time, X so far, weight).

Rockafellar and Uryasev: CVaR_alpha(X) = max over nu of nu - E(nu - X)+ / alpha. With a price on the limit (a Lagrange
multiplier), the problem is to maximise

    E[X] + price * (nu - E(nu - X)+ / alpha)

over policies and nu. For a fixed nu that is an ordinary problem with a reward at the end that depends on Y = X - nu
only, so one backward pass from every Y answers for every nu at once: the start of an episode is Y = -nu. The price is
then the smallest at which the limit holds.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from tailguard.errors import TailguardError

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Table(NamedTuple):
    """Target weight by step, Y = X - threshold, and weight held."""

    target: npt.NDArray[np.float32]  # (steps, Y, H); H = 1 when trading is free
    first: float  # of the grid of Y
    step: float
    weights: Array  # (H,) of weights held
    threshold: float

    def weight(self, step: npt.NDArray[np.int64], x: Array, held: Array) -> Array:
        """(N,) target weight, linear in Y and of the nearest weight held."""
        n_steps, n_levels, n_held = self.target.shape
        t = np.clip(step, 0, n_steps - 1)
        place = np.clip((x - self.threshold - self.first) / self.step, 0.0, n_levels - 1.001)
        i = place.astype(np.int64)
        h = np.abs(held[:, None] - self.weights).argmin(axis=1) if n_held > 1 else np.zeros(len(x), dtype=np.int64)
        low, high = self.target[t, i, h].astype(np.float64), self.target[t, i + 1, h].astype(np.float64)
        return np.asarray(low + (place - i) * (high - low))


class Answer(NamedTuple):
    table: Table
    mean: float
    cvar: float
    price: float


class Grid(NamedTuple):
    levels: Array  # (Y,) evenly spaced, holds 0
    weights: Array  # (W,) targets, and weights held
    free: bool  # trading costs nothing, so the weight held is no state


@numba.njit(cache=True, nogil=True)
def _at(table: Array, place: float, j: int) -> float:
    """Linear in the level, beyond the ends along the last slope: the true value is straight there."""
    i = min(max(int(place), 0), table.shape[0] - 2)
    return float(table[i, j] + (place - i) * (table[i + 1, j] - table[i, j]))


@numba.njit(cache=True, nogil=True)
def _after(table: Array, y: int, j: int, shift: Array, cell: Ints, share: Array, prob: Array) -> float:
    """Expectation of `table` after one bar from level y with weight j.

    shift: (W, K) levels that Y moves by, in grid steps; cell, share: (W, K) place of the weight held afterwards
    """
    total = 0.0
    for k in range(prob.shape[0]):
        place, h = y + shift[j, k], cell[j, k]
        found = _at(table, place, h)
        if table.shape[1] > 1:
            found += share[j, k] * (_at(table, place, h + 1) - found)
        total += prob[k] * found
    return total


@numba.njit(cache=True, nogil=True)
def _sweep_free(
    value: Array, mean: Array, shift: Array, cell: Ints, share: Array, prob: Array, new: Array, choice: Ints
) -> None:
    """One step back when trading costs nothing: the best weight of each level, whatever is held."""
    for y in range(value.shape[0]):
        best, top = 0, -np.inf
        for j in range(shift.shape[0]):
            v = _after(value, y, j, shift, cell, share, prob)
            if v > top:
                best, top = j, v
        choice[y, 0] = best
        new[0, y, 0] = top
        new[1, y, 0] = _after(mean, y, best, shift, cell, share, prob)


@numba.njit(cache=True, nogil=True)
def _hold(value: Array, mean: Array, shift: Array, cell: Ints, share: Array, prob: Array, held: Array) -> None:
    """held[0], held[1] (Y, W): expectations of `value` and `mean` after one bar with each weight."""
    for y in range(held.shape[1]):
        for j in range(held.shape[2]):
            held[0, y, j] = _after(value, y, j, shift, cell, share, prob)
            held[1, y, j] = _after(mean, y, j, shift, cell, share, prob)


@numba.njit(cache=True, nogil=True)
def _trade(held: Array, toll: Array, new: Array, choice: Ints) -> None:
    """From every weight held to the best target. toll: (H, W) levels that a trade costs, in grid steps, negative."""
    for y in range(new.shape[1]):
        for h in range(new.shape[2]):
            best, top = 0, -np.inf
            for j in range(toll.shape[1]):
                v = _at(held[0], y + toll[h, j], j)
                if v > top:
                    best, top = j, v
            choice[y, h] = best
            new[0, y, h] = top
            new[1, y, h] = _at(held[1], y + toll[h, best], best)


def make_grid(returns: Array, prob: Array, cost: float, n_steps: int, step: float, n_weights: int) -> Grid:
    """Levels reach as far as an episode plausibly does; weights go from none to all on the side that earns."""
    side = 1.0 if float(prob @ returns) >= 0.0 else -1.0
    growth = np.log1p(side * returns)
    centre, spread = float(prob @ growth), float(np.sqrt(prob @ (growth - prob @ growth) ** 2))
    reach = abs(centre) * n_steps + 6.0 * spread * np.sqrt(n_steps) + np.abs(growth).max()
    n = int(np.ceil(reach / step))
    levels: Array = step * np.arange(-n, n + 1, dtype=np.float64)
    return Grid(levels, side * np.linspace(0.0, 1.0, n_weights), cost == 0.0)


def backward(
    grid: Grid, returns: Array, prob: Array, cost: float, n_steps: int, penalty: float
) -> tuple[npt.NDArray[np.float32], Array, Array]:
    """Maximise E[Y - penalty * (-Y)+]; returns targets (T, Y, H), and value and E[Y] (Y, H) at the start."""
    levels, weights, free = grid
    step = float(levels[1] - levels[0])
    n_held = 1 if free else len(weights)
    gain = 1.0 + weights[:, None] * returns  # (W, K)
    shift = np.log(gain) / step
    after = weights[:, None] * (1.0 + returns) / gain
    place = np.clip(after / (weights[1] - weights[0]), 0.0, len(weights) - 1.0)
    cell: Ints = np.zeros(shift.shape, dtype=np.int64)
    if not free:
        cell = np.minimum(place.astype(np.int64), len(weights) - 2).astype(np.int64)
    share = place - cell
    start = np.zeros(1) if free else weights
    toll = np.log1p(-cost * np.abs(weights[None, :] - start[:, None])) / step

    value = np.repeat((levels - penalty * np.maximum(-levels, 0.0))[:, None], n_held, axis=1)
    mean = np.repeat(levels[:, None], n_held, axis=1)
    held = np.empty((2, len(levels), len(weights)))
    new = np.empty((2, len(levels), n_held))
    choice: Ints = np.empty((len(levels), n_held), dtype=np.int64)
    target = np.empty((n_steps, len(levels), n_held), dtype=np.float32)
    for t in range(n_steps - 1, -1, -1):
        if free:
            _sweep_free(value, mean, shift, cell, share, prob, new, choice)
        else:
            _hold(value, mean, shift, cell, share, prob, held)
            _trade(held, toll, new, choice)
        value[...], mean[...] = new
        target[t] = weights[choice]
    return target, value, mean


def at_price(grid: Grid, returns: Array, prob: Array, cost: float, n_steps: int, alpha: float, price: float) -> Answer:
    """The best policy and threshold for one price of the limit."""
    target, value, mean = backward(grid, returns, prob, cost, n_steps, price / alpha)
    nu = -grid.levels
    start = int(((1.0 + price) * nu + value[:, 0]).argmax())  # column 0: an episode starts flat
    threshold = float(nu[start])
    table = Table(target, float(grid.levels[0]), float(grid.levels[1] - grid.levels[0]), grid.weights, threshold)
    shortfall = (mean[start, 0] - value[start, 0]) * alpha / price  # E(nu - X)+
    return Answer(table, float(mean[start, 0] + threshold), float(threshold - shortfall / alpha), price)


def solve(
    returns: Array, prob: Array, cost: float, n_steps: int, volatility: float, alpha: float, limit: float
) -> Answer:
    """Bisect the price of the limit, first on a coarse grid, then near that price on a fine one."""

    def at(grid: Grid, price: float) -> Answer:
        return at_price(grid, returns, prob, cost, n_steps, alpha, price)

    coarse = make_grid(returns, prob, cost, n_steps, volatility / 2.0, 21)
    fine = make_grid(returns, prob, cost, n_steps, volatility / 4.0, 41 if cost == 0.0 else 21)
    low, high = 1e-3, 1e3
    free = at(fine, low)
    if free.cvar >= limit:
        return free._replace(price=0.0)
    while high / low > 1.02:
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if at(coarse, middle).cvar >= limit else (middle, high)
    low, high = 0.8 * low, 1.25 * high
    answer = at(fine, high)
    while answer.cvar < limit:
        low, high = high, 1.5 * high
        if high > 1e4:
            raise TailguardError(f"No policy on the grid keeps CVaR at {limit}; the best reaches {answer.cvar:.4f}.")
        answer = at(fine, high)
    while high / low > 1.01 and answer.cvar - limit > 1e-3 * abs(limit):
        middle = float(np.sqrt(low * high))
        trial = at(fine, middle)
        if trial.cvar >= limit:
            high, answer = middle, trial
        else:
            low = middle
    return answer
