"""Are predicted quantiles those of what then happened? Pure functions of arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailguard.errors import ConfigError
from tailguard.losses.normal import normal_cdf, normal_quantile

Floats = NDArray[np.floating[Any]]


def coverage(quantiles: Floats, realised: Floats) -> Floats:
    """Share of outcomes at or below each predicted quantile: the quantile's level, when the prediction is calibrated.

    quantiles: (n, Q), or (Q,) for one prediction that serves all
    realised:  (n,)
    returns:   (Q,)
    """
    quantiles, realised = pair(quantiles, realised)
    return np.asarray((realised[:, None] <= quantiles).mean(0))


def coverage_error(quantiles: Floats, realised: Floats, levels: Floats, tolerance: float) -> float:
    """Largest difference between a share of outcomes and its level, when outcomes within `tolerance` of a quantile may
    lie on either side: where nearly all are one number, a hair's breadth would otherwise decide on all of them."""
    below, within = (coverage(quantiles + side, realised) for side in (-tolerance, tolerance))
    return float(np.maximum(below - levels, levels - within).clip(min=0.0).max())


def pit(quantiles: Floats, realised: Floats, levels: Sequence[float]) -> Floats:
    """Probability integral transform: the level at which each outcome fell in its predicted law.

    quantiles: (n, Q) at `levels`, or (Q,);  realised: (n,)
    returns:   (n,) in (0, 1), uniform when the prediction is calibrated

    The law between and beyond the levels is linear in the normal score, as everywhere (docs/algorithm.md, eq. 7).
    """
    quantiles, realised = pair(quantiles, realised)
    ordered, nodes = np.sort(quantiles, -1), normal_quantile(levels)
    if len(nodes) == 1:
        raise ConfigError("pit: one quantile says nothing of the law around it. Predict at least two.")
    left = np.clip((ordered < realised[:, None]).sum(-1) - 1, 0, len(nodes) - 2)[:, None]
    low, high = (np.take_along_axis(ordered, left + i, -1)[:, 0] for i in (0, 1))
    z_low, z_high = nodes[left[:, 0]], nodes[left[:, 0] + 1]
    width = np.maximum(high - low, 1e-12 * np.maximum(np.abs(high), 1e-300))  # equal quantiles are a step
    score = z_low + (z_high - z_low) * np.clip((realised - low) / width, -1e6, 1e6)
    return normal_cdf(score)


def pit_histogram(quantiles: Floats, realised: Floats, levels: Sequence[float], n_bins: int = 10) -> Floats:
    """(n_bins,) share of outcomes per bin of the transform, times n_bins: 1 everywhere when calibrated.

    A hump in the middle: the predicted law is too wide. A bowl: too narrow. A slope: its mean is off.
    """
    counts, _ = np.histogram(pit(quantiles, realised, levels), bins=n_bins, range=(0.0, 1.0))
    return np.asarray(counts / counts.sum() * n_bins)


def pinball(quantiles: Floats, realised: Floats, levels: Sequence[float]) -> Floats:
    """(Q,) mean quantile loss per level; the true quantile has the least of all predictions.

    quantiles: (n, Q) at `levels`, or (Q,);  realised: (n,)
    """
    quantiles, realised = pair(quantiles, realised)
    error, tau = realised[:, None] - quantiles, np.asarray(levels)
    return np.asarray(np.maximum(tau * error, (tau - 1.0) * error).mean(0))


def pinball_skill(quantiles: Floats, realised: Floats, levels: Sequence[float]) -> Floats:
    """(Q,) 1 - loss / loss of the best constant forecast, known with hindsight; above 0 the prediction knows more.

    Where returns do not depend on what is seen, no forecast beats the constant and a calibrated one reaches about 0.
    """
    quantiles, realised = pair(quantiles, realised)
    best = np.quantile(realised, np.asarray(levels), method="inverted_cdf")
    constant = pinball(best, realised, levels)
    return 1.0 - pinball(quantiles, realised, levels) / np.maximum(constant, 1e-300)


def realised_cvar(thresholds: Floats, realised: Floats, alpha: float) -> float:
    """Mean over outcomes of nu - (nu - Z)+ / alpha: the mean CVaR_alpha, if nu is each prediction's alpha-quantile.

    thresholds, realised: (...)

    Rockafellar and Uryasev: any other nu gives less. So this figure next to the predicted CVaR compares like with like,
    although every outcome has a law of its own.
    """
    shortfall = np.maximum(thresholds - realised, 0.0)
    return float((thresholds - shortfall / alpha).mean())


def pair(quantiles: Floats, realised: Floats) -> tuple[Floats, Floats]:
    """(n, Q) and (n,), or a clear refusal."""
    quantiles, realised = np.asarray(quantiles, dtype=np.float64), np.asarray(realised, dtype=np.float64)
    if realised.ndim != 1 or not len(realised) or quantiles.shape[:-1] not in ((), realised.shape):
        raise ConfigError(
            f"Predictions of shape {quantiles.shape} do not go with outcomes of shape {realised.shape}: "
            "give (n, Q), or (Q,) for all, and (n,) with n >= 1."
        )
    return np.broadcast_to(quantiles, (len(realised), quantiles.shape[-1])), realised
