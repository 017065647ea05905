"""Synthetic bars for the tests of the market half: small, seeded, valid unless a test breaks them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

from tailguard.market import Bars

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
MINUTE = np.timedelta64(60_000, "ms")
HOUR = 60 * MINUTE


def random_bars(
    n: int = 300,
    symbols: tuple[str, ...] = ("AAA",),
    *,
    seed: int = 0,
    step: np.timedelta64 = HOUR,
    missing: float = 0.0,
) -> Bars:
    """Log-normal walks; a share `missing` of bars is absent."""
    rng = np.random.default_rng(seed)
    shape = (n, len(symbols))
    close = 100.0 * np.exp(np.cumsum(rng.normal(0.0, 0.01, shape), axis=0))
    open_ = np.concatenate([close[:1], close[:-1]]) * np.exp(rng.normal(0.0, 0.001, shape))
    high = np.maximum(open_, close) * np.exp(np.abs(rng.normal(0.0, 0.003, shape)))
    low = np.minimum(open_, close) * np.exp(-np.abs(rng.normal(0.0, 0.003, shape)))
    tradable = rng.random(shape) >= missing
    tradable[:, 0] |= ~tradable.any(axis=1)  # every stamp of the clock has a bar
    tradable[0] = True  # and the frame meets the symbols in their order
    ts = np.datetime64("2024-01-01T00:00", "ms") + step * np.arange(n)
    volume = rng.lognormal(3.0, 0.5, shape)
    return Bars.from_arrays(ts, symbols, open_, high, low, close, volume, tradable)


def frame(n: int = 300, **options: object) -> pl.DataFrame:
    """The frame of random bars, for tests that break it."""
    return random_bars(n, **options).frame  # type: ignore[arg-type]
