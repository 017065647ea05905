"""Small random markets for the tests of this folder."""

from __future__ import annotations

import numpy as np

from tailguard.market import Bars

HOUR = np.timedelta64(3_600_000, "ms")


def random_bars(n_bars: int = 400, n_assets: int = 2, seed: int = 0, missing: float = 0.0, gap: float = 0.002) -> Bars:
    """Geometric walks whose open differs from the close before it; a share `missing` of the bars does not exist."""
    rng = np.random.default_rng(seed)
    shape = (n_bars, n_assets)
    close = 100.0 * np.exp(np.cumsum(rng.normal(0.0, 0.01, shape), axis=0))
    open_ = np.vstack([close[:1], close[:-1]]) * np.exp(rng.normal(0.0, gap, shape))
    high = np.maximum(open_, close) * (1.0 + rng.uniform(0.0, 0.003, shape))
    low = np.minimum(open_, close) * (1.0 - rng.uniform(0.0, 0.003, shape))
    tradable = rng.uniform(size=shape) >= missing
    tradable[:, 0] |= ~tradable.any(axis=1)
    ts = np.datetime64("2024-01-01T00:00:00", "ms") + np.arange(n_bars) * HOUR
    symbols = [f"S{a}" for a in range(n_assets)]
    return Bars.from_arrays(ts, symbols, open_, high, low, close, rng.uniform(1e3, 1e5, shape), tradable)
