"""Recurrences over the steps of a rollout."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]


def reverse_scan(terms: Float64s, carried: Float64s, last: Float64s) -> Float64s:
    """Sums s[t] = terms[t] + carried[t] * s[t + 1] from s[T] = last; nothing passes where carried is zero.

    terms, carried: (T, N);  last: (N,)
    returns:        (T, N)
    """
    sums = np.empty_like(terms)
    after = last
    for t in range(len(terms) - 1, -1, -1):
        with np.errstate(invalid="ignore"):
            after = terms[t] + np.where(carried[t] != 0.0, carried[t] * after, 0.0)
        sums[t] = after
    return sums
