"""What a grid of quantiles says about a law: interpolation, samples, mean, VaR, CVaR and spectral measures.

One model of the law is used everywhere: the quantile function is linear in z = Phi^-1(tau) between the levels and
beyond them, which is exact for every normal law at any number of quantiles (docs/algorithm.md, eq. 7).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.errors import ConfigError
from tailguard.losses.normal import normal_cdf, normal_density, normal_quantile

Floats = NDArray[np.floating[Any]]
Method = Literal["normal", "step"]
Distortion = Callable[[Floats], Floats]


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
    nodes, z = normal_quantile(levels), normal_quantile(at)
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
        weights = normal_tail_weights(normal_quantile(levels), float(normal_quantile(alpha))) / alpha
    return tuple(float(weight) for weight in weights)


def normal_tail_weights(nodes: Floats, end: float, shift: float = 0.0) -> Floats:
    """Integral of the z-linear quantile function over (-inf, end], per quantile, with z normal around -shift.

    A segment a + b z from z1 to z2 contributes a (Phi2 - Phi1) - b (phi2 - phi1), a and b as of z + shift.
    """
    nodes, end = nodes + shift, end + shift
    n_segments = len(nodes) - 1
    lower = np.concatenate([[-np.inf], nodes[1:-1]])
    upper = np.minimum(np.concatenate([nodes[1:-1], [np.inf]]), end)
    used = lower < end
    mass = np.where(used, normal_cdf(upper) - normal_cdf(lower), 0.0)
    density = np.where(used, normal_density(upper) - normal_density(lower), 0.0)
    width = np.diff(nodes)
    slope_part = (-density - nodes[:-1] * mass) / width  # weight of b, with a = q_i - b z_i
    weights = np.zeros(n_segments + 1)
    weights[:-1] += mass - slope_part
    weights[1:] += slope_part
    return weights


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
    grid = levels_for("cvar", quantiles, levels)
    return weighted(quantiles, np.asarray(cvar_weights(grid, float(alpha), method)))


def var(quantiles: Tensor, alpha: float, levels: Sequence[float] | None = None) -> Tensor:
    """The alpha-quantile, value at risk: what the worst share alpha of outcomes does not exceed.

    quantiles: (..., Q) at the midpoints (i + 1/2)/Q, or at `levels`
    returns:   (...)
    """
    if not 0.0 < alpha < 1.0:
        raise ConfigError(f"var: alpha={alpha} is not in (0, 1). 0.05 reads 'worse in 5 % of outcomes'.")
    grid = levels_for("var", quantiles, levels)
    return weighted(quantiles, interpolation_weights(grid, np.array([alpha]))[:, 0])


def wang(quantiles: Tensor, shift: float, levels: Sequence[float] | None = None) -> Tensor:
    """Wang's measure: the mean after every normal score has been lowered by `shift`; mean - shift * std if normal.

    quantiles: (..., Q) at the midpoints (i + 1/2)/Q, or at `levels`
    returns:   (...)    shift 0 is the mean, a positive one fears losses, a negative one likes risk
    """
    if not np.isfinite(shift):
        raise ConfigError(f"wang: shift={shift} is no number of standard deviations. 0.5 to 1 is usual.")
    grid = levels_for("wang", quantiles, levels)
    if len(grid) == 1:
        return quantiles[..., 0]
    nodes = normal_quantile(grid)
    return weighted(quantiles, normal_tail_weights(nodes, np.inf, float(shift)))


def spectral(quantiles: Tensor, distortion: Distortion, levels: Sequence[float] | None = None) -> Tensor:
    """A distorted mean: outcomes in order, the worst share u counted with mass distortion(u).

    quantiles:  (..., Q) at the midpoints (i + 1/2)/Q, or at `levels`
    distortion: from [0, 1] onto [0, 1], not falling; u -> min(u / alpha, 1) is CVaR_alpha, u -> u the mean. A concave
                one is a spectral measure: worse outcomes never count less
    returns:    (...)
    """
    grid = levels_for("spectral", quantiles, levels)
    edges = normal_cdf(np.linspace(-8.0, 8.0, 8_001))  # fine where the tails are: even steps of the normal score
    edges[0], edges[-1] = 0.0, 1.0
    masses = np.diff(np.asarray(distortion(edges), dtype=np.float64))
    ends_right = abs(float(masses.sum()) - 1.0) < 1e-9 and abs(float(distortion(edges[:1])[0])) < 1e-9
    if not ends_right or (masses < -1e-12).any():
        raise ConfigError("spectral: the distortion must rise from 0 at 0 to 1 at 1 and never fall.")
    at = normal_cdf(np.linspace(-7.999, 7.999, 8_000))
    return weighted(quantiles, interpolation_weights(grid, at) @ masses)


def empirical_cvar(outcomes: Floats, alpha: float) -> float:
    """Mean of the worst share alpha of outcomes (n,); the last one counts in part, and one outcome counts at least."""
    ordered = np.sort(np.asarray(outcomes, dtype=np.float64))
    share = max(alpha * len(ordered), 1.0)
    counted = np.clip(share - np.arange(len(ordered)), 0.0, 1.0)
    return float(ordered @ counted / share)


def monotone(quantiles: Tensor) -> Tensor:
    """Quantiles (..., Q) in order: sorting removes crossings and never raises the quantile loss of any sample."""
    return quantiles.sort(-1).values


def levels_for(name: str, quantiles: Tensor, levels: Sequence[float] | None) -> tuple[float, ...]:
    """The levels given, or the midpoints; one per quantile."""
    grid = midpoint_levels(quantiles.shape[-1]) if levels is None else tuple(levels)
    if len(grid) != quantiles.shape[-1]:
        raise ConfigError(f"{name}: {quantiles.shape[-1]} quantiles but {len(grid)} levels.")
    return grid


def weighted(quantiles: Tensor, weights: Floats) -> Tensor:
    """Sum over the quantiles, each with its weight."""
    return quantiles @ torch.as_tensor(weights, dtype=quantiles.dtype, device=quantiles.device)
