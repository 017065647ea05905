"""Recurrences over the steps of a rollout, element by element in Python."""

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
    for n, after in enumerate(last.tolist()):
        column = []
        for term, factor in zip(terms[::-1, n].tolist(), carried[::-1, n].tolist(), strict=True):
            after = term + (factor * after if factor != 0.0 else 0.0)
            column.append(after)
        sums[::-1, n] = column
    return sums
