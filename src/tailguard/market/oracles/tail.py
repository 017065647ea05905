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


def make_grid(returns: Array, prob: Array, cost: float, n_steps: int, step: float, n_weights: int) -> Grid:
    """Levels reach as far as an episode plausibly does; weights go from none to all on the side that earns."""
    side = 1.0 if float(prob @ returns) >= 0.0 else -1.0
    growth = np.log1p(side * returns)
    centre, spread = float(prob @ growth), float(np.sqrt(prob @ (growth - prob @ growth) ** 2))
    reach = abs(centre) * n_steps + 6.0 * spread * np.sqrt(n_steps) + np.abs(growth).max()
    n = int(np.ceil(reach / step))
    levels: Array = step * np.arange(-n, n + 1, dtype=np.float64)
    return Grid(levels, side * np.linspace(0.0, 1.0, n_weights), cost == 0.0)


class ShiftedSums:
    """For a table (Y, C) the sums over k of factor[r, k] * table[y + shift[r, k], column[r, k]], for each (y, r).

    shift, column, factor: (R, K). Linear in the level, beyond the ends along the last slope: the true value is straight
    there.
    """

    def __init__(self, n_levels: int, n_columns: int, shift: Array, column: Ints, factor: Array) -> None:
        from scipy import sparse  # takes a tenth of a second to import, and few ask for an optimum

        self.n_levels, self.n_columns = n_levels, n_columns
        self.shift, self.column, self.factor = shift, column, factor
        below, part = self._places(np.arange(len(shift)))  # (Y, R, K)
        columns = np.stack([below, below + n_columns], axis=-1).astype(np.int32)
        data = factor[..., None] * np.stack([1.0 - part, part], axis=-1)
        ends = np.arange(0, data.size + 1, 2 * shift.shape[1], dtype=np.int32)
        shape = n_levels * len(shift), n_levels * n_columns
        self._matrix = sparse.csr_array((data.ravel(), columns.ravel(), ends), shape=shape)
        self._matrix.sum_duplicates()

    def all(self, table: Array) -> Array:
        """(Y, R) every sum."""
        return np.asarray(self._matrix @ table.ravel()).reshape(self.n_levels, -1)

    def some(self, table: Array, rows: Ints) -> Array:
        """(Y, M) the sums r = rows[y, m] of each level."""
        below, part = self._places(rows)
        flat = table.ravel()
        value, above = flat[below], flat[below + self.n_columns]
        return np.asarray((self.factor[rows] * (value + part * (above - value))).sum(axis=-1))

    def _places(self, rows: Ints) -> tuple[Ints, Array]:
        """Flat index of the entry below each place that is read, and how far the place is towards the next level."""
        place = np.arange(self.n_levels)[:, None, None] + self.shift[rows]
        below = np.clip(place.astype(np.int64), 0, self.n_levels - 2)
        return below * self.n_columns + self.column[rows], place - below


class Bar:
    """One bar on a grid: what holding each weight brings, and what trading to each weight costs before.

    Both are linear in the values that follow, so they are sparse products; only the choice of the best weight is not.
    """

    def __init__(self, grid: Grid, returns: Array, prob: Array, cost: float) -> None:
        levels, weights, free = grid
        n_levels, n_weights, step = len(levels), len(weights), float(levels[1] - levels[0])
        gain = 1.0 + weights[:, None] * returns  # (W, K)
        shift, chance = np.log(gain) / step, np.broadcast_to(prob, gain.shape)
        if free:  # expectation after a bar from each level with each weight
            self.hold = None
            self.options = ShiftedSums(n_levels, 1, shift, np.zeros(shift.shape, np.int64), chance)
            return
        place = weights[:, None] * (1.0 + returns) / gain / (weights[1] - weights[0])  # weight held after it, in steps
        place = np.clip(place, 0.0, n_weights - 1.0)
        cell = np.minimum(place.astype(np.int64), n_weights - 2)
        share = chance * (place - cell)
        corners, shares = np.hstack([cell, cell + 1]), np.hstack([chance - share, share])
        self.hold = ShiftedSums(n_levels, n_weights, np.tile(shift, 2), corners, shares)
        toll = np.log1p(-cost * np.abs(weights - weights[:, None])) / step  # (H, W) levels, negative
        target = np.tile(np.arange(n_weights), n_weights)[:, None]
        self.options = ShiftedSums(n_levels, n_weights, toll.reshape(-1, 1), target, np.ones((toll.size, 1)))


def backward(bar: Bar, grid: Grid, n_steps: int, penalty: float) -> tuple[npt.NDArray[np.uint8], Array, Array]:
    """Maximise E[Y - penalty * (-Y)+].

    returns: the choice of a weight (T, Y, H), and value and E[Y] (Y, H) at the start
    """
    n_levels, n_weights, n_held = len(grid.levels), len(grid.weights), 1 if grid.free else len(grid.weights)
    value = np.repeat((grid.levels - penalty * np.maximum(-grid.levels, 0.0))[:, None], n_held, axis=1)
    mean = np.repeat(grid.levels[:, None], n_held, axis=1)
    choice = np.empty((n_steps, n_levels, n_held), dtype=np.uint8)
    first = n_weights * np.arange(n_held)  # of the options of each weight held
    for t in range(n_steps - 1, -1, -1):
        if bar.hold is not None:
            value, mean = bar.hold.all(value), bar.hold.all(mean)
        options = bar.options.all(value)  # (Y, H W)
        choice[t] = best = options.reshape(n_levels, n_held, n_weights).argmax(axis=2)
        value, mean = np.take_along_axis(options, first + best, axis=1), bar.options.some(mean, first + best)
    return choice, value, mean


def at_price(bar: Bar, grid: Grid, n_steps: int, alpha: float, limit: float, price: float) -> Answer | None:
    """The best of the policies that one price makes, over all thresholds, that keep the limit."""
    choice, value, mean = backward(bar, grid, n_steps, price / alpha)
    nu = -grid.levels
    expected = mean[:, 0] + nu  # column 0: an episode starts flat
    cvar = nu - (mean[:, 0] - value[:, 0]) / price  # a lower bound for any nu, the value at the best one
    if not (cvar >= limit).any():
        return None
    # of thresholds with the same expectation the one that tells the CVaR best: the limit need not bind
    start = int(np.where(cvar >= limit, expected + 1e-4 * cvar, -np.inf).argmax())
    target, step = grid.weights.astype(np.float32)[choice], float(grid.levels[1] - grid.levels[0])
    table = Table(target, float(grid.levels[0]), step, grid.weights, float(nu[start]))
    return Answer(table, float(expected[start]), float(cvar[start]), price)


def solve(
    returns: Array, prob: Array, cost: float, n_steps: int, volatility: float, alpha: float, limit: float
) -> Answer:
    """Search the price of the limit: widely on a coarse grid, then closely on a fine one.

    For a fixed threshold the problem is convex and a price answers it; over thresholds it is not, so the limit can jump
    over the one asked for as the price moves. Hence a search for the best expectation, not for the price that meets it.
    """

    def best(grid: Grid, bar: Bar, prices: Array) -> Answer | None:
        top: Answer | None = None  # one at a time: a table can be large
        for price in prices.tolist():
            found = at_price(bar, grid, n_steps, alpha, limit, price)
            if found is not None and (top is None or found.mean > top.mean):
                top = found
        return top

    coarse = make_grid(returns, prob, cost, n_steps, volatility / 2.0, 21)
    bar = Bar(coarse, returns, prob, cost)
    answer = best(coarse, bar, np.geomspace(LEAST, 300.0, 26))
    if answer is not None:
        answer = best(coarse, bar, answer.price * np.geomspace(1.0 / 1.5, 1.5, 7)) or answer
        fine = make_grid(returns, prob, cost, n_steps, volatility / 4.0, 41 if cost == 0.0 else 21)
        bar = Bar(fine, returns, prob, cost)
        for ratio, n_prices in ((1.1, 5), (1.02, 7)):
            answer = best(fine, bar, answer.price * np.geomspace(1.0 / ratio, ratio, n_prices)) or answer
    if answer is None:
        raise TailguardError(f"No policy on the grid keeps CVaR at {limit} or better. Use a lower limit.")
    return answer if answer.price > 2.0 * LEAST else answer._replace(price=0.0)
