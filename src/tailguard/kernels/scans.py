"""Recurrences over the steps of a rollout."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailguard.kernels.core import native
from tailguard.kernels.reference import scans as reference

Floats = NDArray[np.floating[Any]]
Float64s = NDArray[np.float64]
Bools = NDArray[np.bool_]


def reverse_scan(terms: Floats, carried: Floats, last: Floats) -> Float64s:
    """Sums s[t] = terms[t] + carried[t] * s[t + 1] from s[T] = last; nothing passes where carried is zero.

    terms, carried: (T, N);  last: (N,)
    returns:        (T, N) float64
    """
    terms, carried, last = (np.ascontiguousarray(part, np.float64) for part in (terms, carried, last))
    module = native()
    if module is None:
        return reference.reverse_scan(terms, carried, last)
    sums = np.empty_like(terms)
    module.reverse_scan(terms, carried, last, sums)
    return sums


def walk_periods(
    rewards: Floats, terminated: Bools, truncated: Bools, horizon: int, so_far: Floats, elapsed: Floats
) -> tuple[Float64s, Float64s, Bools, Bools]:
    """Sum rewards per period: where each period stands before every step, and which steps end or cut one.

    rewards, terminated, truncated: (T, N)
    horizon:                        steps of a period; 0 for the episode
    so_far, elapsed:                (N,) sum and steps of the period before the first step
    returns:                        sums and steps before each step (T + 1, N); steps that complete a period, and steps
                                    whose episode is truncated inside one (T, N)

    A termination completes a period however short it is. A truncation completes it without a horizon, else cuts it.
    """
    n_steps, n_envs = rewards.shape
    sums, steps = np.empty((n_steps + 1, n_envs)), np.empty((n_steps + 1, n_envs))
    ended, cut = np.empty(rewards.shape, np.bool_), np.empty(rewards.shape, np.bool_)
    sums[0], steps[0] = so_far, elapsed
    module = native()
    walk = reference.walk_periods if module is None else module.walk_periods
    added = np.ascontiguousarray(rewards, np.float64)
    terminal, limit = np.ascontiguousarray(terminated, np.bool_), np.ascontiguousarray(truncated, np.bool_)
    walk(added, terminal, limit, horizon, sums, steps, ended, cut)
    return sums, steps, ended, cut
