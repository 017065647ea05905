"""Recurrences over the steps of a rollout, element by element in Python."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]
Bools = NDArray[np.bool_]


def reverse_scan(terms: Float64s, carried: Float64s, last: Float64s) -> Float64s:
    """Sums s[t] = terms[t] + carried[t] * s[t + 1] from s[T] = last; nothing passes where carried is zero.

    terms, carried: (T, N);  last: (N,)
    returns:        (T, N)
    """
    sums = np.empty_like(terms)
    for n, after in enumerate(last.tolist()):
        column = []
        for term, factor in zip(terms[::-1, n].tolist(), carried[::-1, n].tolist(), strict=True):
            after = term + (factor * after if factor != 0.0 else 0.0)
            column.append(after)
        sums[::-1, n] = column
    return sums


def walk_periods(
    rewards: Float64s,
    terminated: Bools,
    truncated: Bools,
    horizon: int,
    so_far: Float64s,
    elapsed: Float64s,
    ended: Bools,
    cut: Bools,
) -> None:
    """Fill the rows after the first of so_far and elapsed (T + 1, N), and ended and cut (T, N).

    horizon: steps of a period; 0 for the episode
    """
    for t in range(len(rewards)):
        after, count = so_far[t] + rewards[t], elapsed[t] + 1.0
        complete = count >= horizon if horizon else truncated[t]
        ended[t] = terminated[t] | complete
        cut[t] = truncated[t] & ~ended[t]
        over = ended[t] | cut[t]
        so_far[t + 1], elapsed[t + 1] = np.where(over, 0.0, after), np.where(over, 0.0, count)
