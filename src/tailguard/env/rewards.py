"""The reward is what the account earned: the log growth of equity, net of every cost."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

FLOOR = 1e-3
"""Equity below this part of the episode's start counts as this part: a debt has no logarithm."""


def log_growth(before: Array, after: Array, initial_cash: float) -> Array:
    """(N,) ln(after / before): rewards of an episode add up to the logarithm of its growth."""
    growth: Array = np.log(np.maximum(after, least_equity(initial_cash)) / before)
    return growth


def least_equity(initial_cash: float) -> float:
    """What counts where equity is less."""
    return FLOOR * initial_cash
