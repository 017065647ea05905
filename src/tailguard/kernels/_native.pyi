"""Signatures of the extension module (native/*.cpp); tailguard.kernels is its only caller."""

from typing import Any

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
def close_bar(
    accounts: tuple[Any, ...],
    action: Float64s,
    tape: tuple[Any, ...],
    rates: tuple[float, ...],
    limits: tuple[float, ...],
    length: int,
    least_equity: float,
    growth: Float64s,
    ended: Bools,
) -> int: ...
def observe(
    accounts: tuple[Any, ...],
    rows: NDArray[np.float32],
    mark: Float64s,
    length: int,
    columns: NDArray[np.int64],
    out: NDArray[np.float32],
) -> None: ...
def follow(
    accounts: tuple[Any, ...],
    targets: Float64s,
    tape: tuple[Any, ...],
    rates: tuple[float, ...],
    limits: tuple[float, ...],
    record: Float64s,
    held: Float64s,
) -> int: ...
