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

LEAST = 1e-3
"""The smallest price tried: where it is the best, the limit does not bind."""


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


def at_price(
    grid: Grid, returns: Array, prob: Array, cost: float, n_steps: int, alpha: float, limit: float, price: float
) -> Answer | None:
    """The best of the policies that one price makes, over all thresholds, that keep the limit."""
    target, value, mean = backward(grid, returns, prob, cost, n_steps, price / alpha)
    nu = -grid.levels
    expected = mean[:, 0] + nu  # column 0: an episode starts flat
    cvar = nu - (mean[:, 0] - value[:, 0]) / price  # a lower bound for any nu, the value at the best one
    if not (cvar >= limit).any():
        return None
    # of thresholds with the same expectation the one that tells the CVaR best: the limit need not bind
    start = int(np.where(cvar >= limit, expected + 1e-4 * cvar, -np.inf).argmax())
    table = Table(target, float(grid.levels[0]), float(grid.levels[1] - grid.levels[0]), grid.weights, float(nu[start]))
    return Answer(table, float(expected[start]), float(cvar[start]), price)


def solve(
    returns: Array, prob: Array, cost: float, n_steps: int, volatility: float, alpha: float, limit: float
) -> Answer:
    """Search the price of the limit: widely on a coarse grid, then closely on a fine one.

    For a fixed threshold the problem is convex and a price answers it; over thresholds it is not, so the limit can jump
    over the one asked for as the price moves. Hence a search for the best expectation, not for the price that meets it.
    """

    def best(grid: Grid, prices: Array) -> Answer | None:
        top: Answer | None = None  # one at a time: a table can be large
        for price in prices.tolist():
            found = at_price(grid, returns, prob, cost, n_steps, alpha, limit, price)
            if found is not None and (top is None or found.mean > top.mean):
                top = found
        return top

    coarse = make_grid(returns, prob, cost, n_steps, volatility / 2.0, 21)
    fine = make_grid(returns, prob, cost, n_steps, volatility / 4.0, 41 if cost == 0.0 else 21)
    answer = best(coarse, np.geomspace(LEAST, 300.0, 26))
    for grid, ratio, n_prices in ((coarse, 1.5, 7), (fine, 1.1, 5), (fine, 1.02, 7)):
        if answer is not None:
            answer = best(grid, answer.price * np.geomspace(1.0 / ratio, ratio, n_prices)) or answer
    if answer is None:
        raise TailguardError(f"No policy on the grid keeps CVaR at {limit} or better. Use a lower limit.")
    return answer if answer.price > 2.0 * LEAST else answer._replace(price=0.0)
