"""Bars in the form the kernel reads: no NaN, and for every bar what was known when it closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tailguard.env.accounting import Prices
from tailguard.env.costs import Costs, impact_inputs
from tailguard.env.no_trade import inside
from tailguard.market import Bars

Array = npt.NDArray[np.float64]


class Tape(NamedTuple):
    """All arrays (T, A), C order, finite."""

    open: Array
    mark: Array  # the close, or the last known one
    fillable: npt.NDArray[np.bool_]  # the bar exists, opens outside no-trade windows, and a price was known before it
    sigma: Array
    bar_value: Array

    def at(self, t: npt.NDArray[np.int64]) -> Prices:
        """What a step from bar t (N,) to bar t + 1 reads."""
        return Prices(
            self.mark[t], self.open[t + 1], self.mark[t + 1], self.fillable[t + 1], self.sigma[t], self.bar_value[t]
        )


def tape_of(bars: Bars, costs: Costs, no_trade_windows: Sequence[str] = ()) -> Tape:
    """Marks carry the last known close forward; before the first bar of an asset the mark is 1 and nothing fills."""
    known = np.maximum.accumulate(np.where(bars.tradable, np.arange(len(bars))[:, None], -1), axis=0)
    mark = np.take_along_axis(bars.close, np.maximum(known, 0), axis=0)
    mark = np.where(known >= 0, mark, 1.0)
    fillable = np.zeros(bars.tradable.shape, dtype=np.bool_)
    fillable[1:] = bars.tradable[1:] & (known[:-1] >= 0)
    open_ = np.where(bars.tradable, bars.open, mark)
    sigma, bar_value = impact_inputs(bars, mark, fillable, costs)
    if no_trade_windows:
        fillable[inside(bars.ts, no_trade_windows)] = False
    return Tape(*(np.ascontiguousarray(x) for x in (open_, mark, fillable, sigma, bar_value)))
