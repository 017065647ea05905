"""Signatures of the extension module (native/*.cpp); tailguard.kernels is its only caller."""

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]
Bools = NDArray[np.bool_]

source_digest: str
level: str

def reverse_scan(terms: Float64s, carried: Float64s, last: Float64s, sums: Float64s) -> None: ...
def walk_periods(
    rewards: Float64s,
    terminated: Bools,
    truncated: Bools,
    horizon: int,
    so_far: Float64s,
    elapsed: Float64s,
    ended: Bools,
    cut: Bools,
) -> None: ...
