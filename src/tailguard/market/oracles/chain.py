"""The decision problem that the oracle markets share, and its exact dynamics.

An agent knows an information state x (the signal, the belief, the spread) and holds a weight h of its equity. It trades
to a weight a, and pays the rate c on what it trades. Then the market returns R and x moves to x'. In the accounts of
`tailguard.env`, with the fill at the close just seen, equity goes

    E -> E (1 - c |a - h|) (1 + b R),    b = a / (1 - c |a - h|)

so the reward is ln(1 - c |a - h|) + ln(1 + b R), and the weight held next is h' = b G / (1 + b R), G the growth of the
price held. Nothing is approximated: the weight drifts with the price, and correcting the drift costs money.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Chain(NamedTuple):
    """Information states on a rising grid (X,), and K equally shaped outcomes of one bar from each."""

    grid: Array  # (X,)
    prob: Array  # (X, K) of each outcome, rows sum to 1
    ret: Array  # (X, K) simple return per unit of weight
    growth: Array  # (X, K) growth of the price held; 1 + ret for one asset
    after: Array  # (X, K) information state at the next close
    start: Array  # (X,) probability of each state at the start of an episode
    cost: float  # per unit of weight traded


class Sizes(NamedTuple):
    """How fine the grids are; `finer` gives the next finer ones."""

    states: int = 41
    weights: int = 41  # on [-1, 1]
    nodes: int = 11  # of a Gaussian quadrature

    def finer(self) -> Sizes:
        return Sizes(2 * self.states - 1, 2 * self.weights - 1, self.nodes + 4)


def gaussian(nodes: int) -> tuple[Array, Array]:
    """Nodes and probabilities that integrate a polynomial of degree 2 * nodes - 1 against N(0, 1) exactly."""
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    return x, w / w.sum()


def product_rule(*rules: tuple[Array, Array]) -> tuple[list[Array], Array]:
    """All combinations of independent rules: the nodes of each, flat, and their joint probability."""
    grids = np.meshgrid(*(x for x, _ in rules), indexing="ij")
    weights = np.meshgrid(*(w for _, w in rules), indexing="ij")
    return [x.ravel() for x in grids], np.asarray(np.prod(weights, axis=0)).ravel()


def on_grid(grid: Array, x: Array, prob: Array) -> Array:
    """(X,) probabilities of grid points that keep the mean of a law given by points x and prob: linear splitting."""
    at = np.clip(np.searchsorted(grid, x) - 1, 0, len(grid) - 2)
    share = np.clip((x - grid[at]) / (grid[at + 1] - grid[at]), 0.0, 1.0)
    mass = np.zeros(len(grid))
    np.add.at(mass, at, prob * (1.0 - share))
    np.add.at(mass, at + 1, prob * share)
    return mass
