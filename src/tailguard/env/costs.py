"""What trading costs: always adverse, in basis points, and not zero unless the user says so."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tailguard.configuration import Config, NonNegativeFloat, PositiveInt
from tailguard.errors import ConfigError
from tailguard.market import Bars

Array = npt.NDArray[np.float64]

BPS = 1e-4


class Costs(Config):
    """Costs of a trade and of holding a position; every one is paid, none is ever received."""

    fee_bps: NonNegativeFloat = 2.0
    """Commission, of the notional at the price filled."""
    half_spread_bps: NonNegativeFloat = 1.0
    """Distance from the open to the side of the book that is hit."""
    slippage_bps: NonNegativeFloat = 1.0
    """Further distance, for the time between decision and fill."""
    impact: NonNegativeFloat = 0.1
    """k of k * sigma * sqrt(participation): own order against the trailing traded value of a bar."""
    impact_window: PositiveInt = 50
    """Bars over which sigma and the traded value of a bar are averaged, all of them before the fill."""
    funding_bps_per_bar: NonNegativeFloat = 0.0
    """Charged on the absolute notional at every close. Zero by default: only perpetual contracts have it, and a rate
    that is small per hour is absurd per minute."""
    borrow_bps_per_year: NonNegativeFloat = 50.0
    """Charged on what is borrowed: short notional, and cash below zero."""


class CostRates(NamedTuple):
    """`Costs` as plain fractions per trade and per bar, in the form that the kernels take."""

    fee: float
    adverse: float  # half spread and slippage move the fill price alike
    impact: float
    funding: float
    borrow: float


FREE = CostRates(0.0, 0.0, 0.0, 0.0, 0.0)


def cost_rates(costs: Costs, bars_per_year: float) -> CostRates:
    """Basis points become fractions, the yearly borrow rate becomes one per bar."""
    return CostRates(
        fee=costs.fee_bps * BPS,
        adverse=(costs.half_spread_bps + costs.slippage_bps) * BPS,
        impact=float(costs.impact),
        funding=costs.funding_bps_per_bar * BPS,
        borrow=costs.borrow_bps_per_year * BPS / bars_per_year,
    )


def impact_inputs(bars: Bars, mark: Array, fillable: npt.NDArray[np.bool_], costs: Costs) -> tuple[Array, Array]:
    """Trailing volatility and traded value per bar, both (T, A), known at the close of t.

    The bar that fills the order would know its own volume better, but it is not over when the order meets it.
    """
    if costs.impact == 0.0:
        return np.zeros_like(mark), np.ones_like(mark)
    silent = [symbol for symbol, volume in zip(bars.symbols, bars.volume.T, strict=True) if not (volume > 0).any()]
    if silent:
        raise ConfigError(
            f"impact={costs.impact} needs traded volume, and {silent} have none. Set impact=0, or give their volume."
        )
    growth = np.zeros_like(mark)
    growth[1:] = np.where(fillable[1:], np.log(mark[1:] / mark[:-1]), 0.0)  # the first price of an asset is no move
    sigma = np.sqrt(trailing_mean(growth * growth, costs.impact_window))
    return sigma, trailing_mean(np.where(bars.tradable, bars.volume, 0.0) * mark, costs.impact_window)


def trailing_mean(x: Array, window: int) -> Array:
    """Mean over the last `window` rows; the first rows average what there is.

    Each row is summed afresh: a running sum would carry the rounding of the future's scale into the past's value.
    """
    padded = np.concatenate([np.zeros((window - 1, *x.shape[1:])), x])
    total = np.zeros_like(x)
    for lag in range(window):
        total += padded[lag : lag + len(x)]
    count = np.minimum(np.arange(1, len(x) + 1), window).astype(np.float64)
    mean: Array = total / count[:, None]
    return mean
