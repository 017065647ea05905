"""Generalized advantage estimation with the two kinds of episode end kept apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailguard.kernels.scans import reverse_scan

Floats = NDArray[np.floating[Any]]
Bools = NDArray[np.bool_]


def successor_values(values: Floats, terminal_values: Floats, terminated: Bools, truncated: Bools) -> Floats:
    """Value of what follows each step: nothing after a termination, the terminal observation's after a truncation.

    values:          (T + 1, N) the last row is the value after the rollout
    terminal_values: (T, N) of the terminal observations, where truncated
    returns:         (T, N)
    """
    return np.where(truncated, terminal_values, np.where(terminated, 0.0, values[1:]))


def through_invalid(lam: float, valid: Bools) -> float | Floats:
    """Decay of the trace after each step: `lam`, but 1 where the next step is invalid.

    valid:   (T, N)
    returns: (T, N), or `lam` itself where every step is valid

    No critic learns the value of an invalid step, so nothing may be bootstrapped from it: at a decay of 1 that value
    cancels, and the advantage of the step before looks through to the next valid one.
    """
    if valid.all():
        return lam
    decay = np.full(valid.shape, lam)
    decay[:-1][~valid[1:]] = 1.0
    return decay


def advantages(
    rewards: Floats, values: Floats, successors: Floats, dones: Bools, gamma: float, lam: float | Floats
) -> Floats:
    """GAE (docs/algorithm.md, eq. 14); the trace is cut at every episode end, of either kind.

    rewards, successors, dones: (T, N);  values: (T + 1, N);  lam: one decay, or (T, N) of `through_invalid`
    returns: (T, N)
    """
    errors = rewards + gamma * successors - values[:-1]
    return reverse_scan(errors, gamma * lam * ~dones, np.zeros(errors.shape[1]))


def normalize_valid(values: Floats, valid: Bools) -> Floats:
    """Zero mean and unit std over the valid samples; invalid ones come out as zero."""
    if valid.sum() < 2:
        return np.where(valid, values, 0.0)
    chosen = values[valid]
    return np.where(valid, (values - chosen.mean()) / (chosen.std() + 1e-8), 0.0)
