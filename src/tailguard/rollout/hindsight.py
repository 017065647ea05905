"""A baseline that knows what the world did: the part of an advantage that no action could have changed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Bools = NDArray[np.bool_]

QUIET = 4.0
"""Moves within this many standard deviations and what goes beyond it have a slope each: a jump is not a large step."""
RIDGE = 3e-3
"""Pull towards zero, per sample and in units of each regressor's own size: jumps are few, their slopes are many."""


def hindsight_baseline(advantages: Floats, place: Floats, moves: Floats, valid: Bools | None = None) -> Floats:
    """(T, N) what a regression expects of each advantage, given where the step stood and how the world moved in it.

    advantages: (T, N)
    place:      (T, N, U) known before the step: the action meant, where a risk period stands
    moves:      (T, N, E) what the world did during the step, whatever the action was
    valid:      (T, N) samples that are fitted; None: all

    An action's noise is independent of both, so subtracting this moves no policy gradient, only its noise. Each half of
    the environments is judged by the fit of the other: no sample has a say in its own baseline.
    """
    regressors = crossed(quadratic(place), by_size(moves))
    baseline = np.zeros(advantages.shape)
    counted = np.ones(advantages.shape, np.bool_) if valid is None else valid
    half = np.arange(advantages.shape[1]) % 2 == 0
    for fitted in (half, ~half):
        samples = counted & fitted
        if samples.any() and not fitted.all():
            slopes = ridge_slopes(regressors[samples], advantages[samples])
            baseline[:, ~fitted] = regressors[:, ~fitted] @ slopes
    return baseline * share_of(advantages[counted], baseline[counted])


def quadratic(place: Floats) -> Floats:
    """(..., P) one, every coordinate of (..., U), and every product of two."""
    first, second = np.triu_indices(place.shape[-1])
    one = np.ones((*place.shape[:-1], 1))
    result: Floats = np.concatenate([one, place, place[..., first] * place[..., second]], -1)
    return result


def by_size(moves: Floats) -> Floats:
    """(..., 1 + 2 E) one, and each move of (..., E) in standard deviations, cut at QUIET and beyond it."""
    spread = moves.std(axis=(0, 1))
    scaled = moves / np.where(spread > 0.0, spread, 1.0)
    quiet = scaled.clip(-QUIET, QUIET)
    result: Floats = np.concatenate([np.ones((*moves.shape[:-1], 1)), quiet, scaled - quiet], -1)
    return result


def crossed(left: Floats, right: Floats) -> Floats:
    """(..., P * M) every product of one of (..., P) and one of (..., M)."""
    return (left[..., :, None] * right[..., None, :]).reshape(*left.shape[:-1], -1)


def ridge_slopes(regressors: Floats, target: Floats) -> Floats:
    """(P,) least squares with a ridge."""
    x, y = regressors.reshape(-1, regressors.shape[-1]), target.reshape(-1)
    size = np.sqrt(np.square(x).mean(0))
    scaled = x / np.where(size > 0.0, size, 1.0)
    gram = scaled.T @ scaled + RIDGE * len(x) * np.eye(x.shape[1])
    slopes: Floats = np.linalg.solve(gram, scaled.T @ y) / np.where(size > 0.0, size, 1.0)
    return slopes


def share_of(advantages: Floats, baseline: Floats) -> float:
    """How much of the baseline to subtract, in [0, 1]: none of one that explains nothing."""
    variance = float(np.square(baseline).mean()) if baseline.size else 0.0
    return float(np.clip((advantages * baseline).mean() / variance, 0.0, 1.0)) if variance > 0.0 else 0.0
