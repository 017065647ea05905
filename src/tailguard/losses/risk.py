"""What a grid of quantiles says about a law: interpolation, samples, mean, VaR and CVaR.

One model of the law is used everywhere: the quantile function is linear in z = Phi^-1(tau) between the levels and
beyond them, which is exact for every normal law at any number of quantiles (docs/algorithm.md, eq. 7).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri
from torch import Tensor

from tailguard.errors import ConfigError

Floats = NDArray[np.floating[Any]]
Method = Literal["normal", "step"]


def midpoint_levels(n: int) -> tuple[float, ...]:
    """Levels (i + 1/2)/n: each stands for the same mass 1/n."""
    return tuple((i + 0.5) / n for i in range(n))


def tail_levels(n: int, alpha: float, share: float = 0.5) -> tuple[float, ...]:
    """A grid with about `share` of its n levels below alpha: midpoints of finer cells in the tail, wider above."""
    n_tail = min(max(round(n * share), 1), n - 1)
    edges = np.concatenate([np.linspace(0.0, alpha, n_tail + 1), np.linspace(alpha, 1.0, n - n_tail + 1)[1:]])
    return tuple(float(level) for level in (edges[1:] + edges[:-1]) / 2)


def cell_masses(levels: Sequence[float]) -> Floats:
    """Mass each level stands for, when the levels are the midpoints of adjoining cells of [0, 1]."""
    edges = [0.0]
    for level in levels:
        edges.append(2 * level - edges[-1])
    return np.diff(np.asarray(edges))


def interpolation_weights(levels: Sequence[float], at: Floats) -> Floats:
    """Matrix W with (quantiles @ W)[k] = the quantile function at level at[k].

    levels: (Q,) increasing, in (0, 1)
    at:     (K,) in (0, 1)
    returns: (Q, K)
    """
    nodes, z = ndtri(np.asarray(levels)), ndtri(np.asarray(at))
    weights = np.zeros((len(nodes), len(z)))
    if len(nodes) == 1:
        weights[0] = 1.0
        return weights
    left = np.clip(np.searchsorted(nodes, z) - 1, 0, len(nodes) - 2)  # ends extend their segment
    share = (z - nodes[left]) / (nodes[left + 1] - nodes[left])
    columns = np.arange(len(z))
    weights[left, columns] = 1.0 - share
    weights[left + 1, columns] = share
    return weights


@lru_cache(maxsize=256)
def cvar_weights(levels: tuple[float, ...], alpha: float, method: Method) -> tuple[float, ...]:
    """Weights w with CVaR_alpha = quantiles . w; they sum to one."""
    masses = cell_masses(levels)
    if alpha == 1.0 or len(levels) == 1:
        weights = masses
    elif method == "step":
        below = np.clip(alpha - (np.cumsum(masses) - masses), 0.0, masses)  # the last cell counts in part
        weights = below / alpha
    else:
        weights = normal_tail_weights(ndtri(np.asarray(levels)), float(ndtri(alpha))) / alpha
    return tuple(float(weight) for weight in weights)


def normal_tail_weights(nodes: Floats, end: float) -> Floats:
    """Integral of the z-linear quantile function over (-inf, end], per quantile.

    A segment a + b z from z1 to z2 contributes a (Phi2 - Phi1) - b (phi2 - phi1).
    """
    n_segments = len(nodes) - 1
    lower = np.concatenate([[-np.inf], nodes[1:-1]])
    upper = np.minimum(np.concatenate([nodes[1:-1], [np.inf]]), end)
    used = lower < end
    mass = np.where(used, ndtr(upper) - ndtr(lower), 0.0)
    density = np.where(used, normal_density(upper) - normal_density(lower), 0.0)
    width = np.diff(nodes)
    slope_part = (-density - nodes[:-1] * mass) / width  # weight of b, with a = q_i - b z_i
    weights = np.zeros(n_segments + 1)
    weights[:-1] += mass - slope_part
    weights[1:] += slope_part
    return weights


def normal_density(z: Floats) -> Floats:
    """Standard normal density; zero at infinity."""
    density: Floats = np.exp(-0.5 * np.square(z)) / np.sqrt(2.0 * np.pi)
    return density


def cvar(quantiles: Tensor, alpha: float, method: Method = "normal", levels: Sequence[float] | None = None) -> Tensor:
    """Mean of the worst share alpha of outcomes: (1/alpha) * integral of the quantile function over [0, alpha].

    quantiles: (..., Q) at the midpoints (i + 1/2)/Q, or at `levels`
    returns:   (...)    alpha = 1 gives the mean

    `method="normal"` interpolates linearly in z = Phi^-1(tau); `"step"` gives each quantile its mass, the last in part.
    """
    if not 0.0 < alpha <= 1.0:
        raise ConfigError(f"cvar: alpha={alpha} is not in (0, 1]. 0.05 reads 'the worst 5 % of outcomes'.")
    if method not in ("normal", "step"):
        raise ConfigError(f'cvar: method={method!r} is unknown. Use "normal" or "step".')
    grid = midpoint_levels(quantiles.shape[-1]) if levels is None else tuple(levels)
    if len(grid) != quantiles.shape[-1]:
        raise ConfigError(f"cvar: {quantiles.shape[-1]} quantiles but {len(grid)} levels.")
    weights = torch.tensor(cvar_weights(grid, float(alpha), method), dtype=quantiles.dtype, device=quantiles.device)
    return quantiles @ weights
