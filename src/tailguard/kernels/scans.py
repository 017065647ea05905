"""Recurrences over the steps of a rollout."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailguard.kernels.core import native
from tailguard.kernels.reference import scans as reference

Floats = NDArray[np.floating[Any]]
Float64s = NDArray[np.float64]


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
