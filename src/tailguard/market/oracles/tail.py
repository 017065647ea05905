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
def _hold(value: Array, mean: Array, shift: Array, cell: Ints, share: Array, prob: Array, out: Array) -> None:
    """out[0], out[1] (Y, W): expectations of `value` and `mean` after one bar with each weight.

    shift: (W, K) levels that Y moves by, in grid steps; cell, share: (W, K) place of the weight held afterwards
    """
    n_levels, n_weights = out.shape[1:]
    n_held = value.shape[1]
    for y in range(n_levels):
        for j in range(n_weights):
            total = average = 0.0
            for k in range(prob.shape[0]):
                place = y + shift[j, k]
                h, part = cell[j, k], share[j, k]
                v, m = _at(value, place, h), _at(mean, place, h)
                if n_held > 1:
                    v += part * (_at(value, place, h + 1) - v)
                    m += part * (_at(mean, place, h + 1) - m)
                total += prob[k] * v
                average += prob[k] * m
            out[0, y, j], out[1, y, j] = total, average


@numba.njit(cache=True, nogil=True)
def _trade(held: Array, toll: Array, value: Array, mean: Array, choice: npt.NDArray[np.int64]) -> None:
    """From every weight held to the best target. toll: (H, W) levels that a trade costs, in grid steps, negative."""
    n_levels, n_held = value.shape
    for y in range(n_levels):
        for h in range(n_held):
            best, top = 0, -np.inf
            for j in range(toll.shape[1]):
                v = _at(held[0], y + toll[h, j], j)
                if v > top:
                    best, top = j, v
            choice[y, h] = best
            value[y, h] = top
            mean[y, h] = _at(held[1], y + toll[h, best], best)


def make_grid(returns: Array, prob: Array, cost: float, n_steps: int, volatility: float) -> Grid:
    """Levels reach as far as an episode plausibly does; weights go from none to all on the side that earns."""
    side = 1.0 if float(prob @ returns) >= 0.0 else -1.0
    step = volatility / 5.0
    growth = np.log1p(side * returns)
    centre, spread = float(prob @ growth), float(np.sqrt(prob @ (growth - prob @ growth) ** 2))
    reach = abs(centre) * n_steps + 6.0 * spread * np.sqrt(n_steps) + np.abs(growth).max()
    n = int(np.ceil(reach / step))
    levels: Array = step * np.arange(-n, n + 1, dtype=np.float64)
    return Grid(levels, side * np.linspace(0.0, 1.0, 41 if cost == 0.0 else 21), cost == 0.0)


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
    choice = np.empty((len(levels), n_held), dtype=np.int64)
    target = np.empty((n_steps, len(levels), n_held), dtype=np.float32)
    for t in range(n_steps - 1, -1, -1):
        _hold(value, mean, shift, cell, share, prob, held)
        _trade(held, toll, value, mean, choice)
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
    """Bisect the price of the limit; of the last two answers, the one that keeps the limit."""
    grid = make_grid(returns, prob, cost, n_steps, volatility)
    low, high = 1e-6, 1e3
    answer = at_price(grid, returns, prob, cost, n_steps, alpha, low)
    if answer.cvar >= limit:
        return answer._replace(price=0.0)
    answer = at_price(grid, returns, prob, cost, n_steps, alpha, high)
    if answer.cvar < limit:
        raise TailguardError(f"No policy on the grid keeps CVaR at {limit}; the best reaches {answer.cvar:.4f}.")
    while high / low > 1.01 and answer.cvar - limit > 1e-5:
        middle = float(np.sqrt(low * high))
        trial = at_price(grid, returns, prob, cost, n_steps, alpha, middle)
        if trial.cvar >= limit:
            high, answer = middle, trial
        else:
            low = middle
    return answer
