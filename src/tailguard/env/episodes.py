"""Where episodes start: a hash of (seed of the environment, number of the episode).

A draw has no hidden state, so an environment stepped alone and one stepped among many start at the same bars, and two
integers restore it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniform_integers(seed: Ints, draw: Ints, bound: int) -> Ints:
    """One integer in [0, bound) for each (seed, draw); the bias of the remainder is below bound / 2^64."""
    key = mix(seed.astype(np.uint64) * _GOLDEN + _GOLDEN)
    return (mix(key + (draw.astype(np.uint64) + np.uint64(1)) * _GOLDEN) % np.uint64(bound)).astype(np.int64)
