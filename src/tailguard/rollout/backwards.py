"""What flows from later steps back to earlier ones: in Python such a loop costs more than all the rest of a figure."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailguard.loops import compiled

Floats = NDArray[np.floating[Any]]


def flow_back(terms: Floats, carried: Floats, last: Floats) -> Floats:
    """Sums s[t] = terms[t] + carried[t] * s[t + 1] from s[T] = last; nothing passes where carried is zero.

    terms, carried: (T, N);  last: (N,)
    returns:        (T, N)
    """
    sums: Floats = flow_back_kernel(*(np.ascontiguousarray(part, np.float64) for part in (terms, carried, last)))
    return sums


@compiled
def flow_back_kernel(terms, carried, last):  # type: ignore[no-untyped-def]
    sums, running = np.empty_like(terms), last.copy()
    n_steps, n_envs = terms.shape
    for t in range(n_steps - 1, -1, -1):
        for n in range(n_envs):
            passed = carried[t, n] * running[n] if carried[t, n] != 0.0 else 0.0
            running[n] = terms[t, n] + passed
            sums[t, n] = running[n]
    return sums
