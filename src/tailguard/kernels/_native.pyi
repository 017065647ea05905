"""Signatures of the extension module (native/*.cpp); tailguard.kernels is its only caller."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailguard.kernels.jobs import ActorJob, CriticJob, OutputJob
from tailguard.kernels.layout import TrunkLayout

Float64s = NDArray[np.float64]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

source_digest: str
level: str

class Trunk:
    def __init__(self, layout: TrunkLayout) -> None: ...
    def load(self, weights: Floats) -> None: ...
    def step(self, x: Floats, hidden: Floats, cell: Floats, output: Floats, n_threads: int = 1) -> None: ...

def evaluate(
    trunks: list[Trunk],
    arrays: list[tuple[Floats | None, ...]],
    starts: Bools,
    sequence_length: int,
    where: Ints,
    n_threads: int,
) -> None: ...
def gradients(jobs: list[ActorJob | CriticJob | OutputJob], chosen: Ints, n_threads: int) -> list[list[float]]: ...

class Tape:
    def __init__(self, job: OutputJob, chosen: Ints, output: Floats, features: Floats, n_threads: int) -> None: ...
    def backward(self, n_threads: int) -> None: ...

def quantile_huber(
    quantiles: Floats,
    samples: Floats,
    levels: Floats,
    kappa: float,
    loss: Floats,
    gradient: Floats,
    n_threads: int,
) -> None: ...
def reverse_scan(terms: Float64s, carried: Float64s, last: Float64s, sums: Float64s) -> None: ...
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
def gated_step(
    parts: Sequence[tuple[int, ...]],
    numbers: Sequence[tuple[float, ...]],
    minmax: bool,
    protect_weights: bool,
    finite_only: bool,
    n_threads: int,
) -> float | None: ...
def squared_norms(values: Floats, cuts: Ints) -> list[float]: ...

class GradientObserver:
    def __init__(self, sizes: Ints, starts: Ints, lengths: Ints, firsts: Ints) -> None: ...
    def observe(
        self,
        addresses: NDArray[np.uint64],
        beta: float,
        mean: Floats,
        kept: Float64s,
        new_mean: Floats,
        new_kept: Float64s,
    ) -> None: ...
