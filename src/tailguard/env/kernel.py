"""The accounting of `accounting.py` in machine code: one pass over the environments, nothing allocated.

No fastmath, so every operation rounds as it does in numpy and the two agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

from tailguard.env.accounting import Limits
from tailguard.env.costs import CostRates
from tailguard.env.tape import Tape

Array = npt.NDArray[np.float64]
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """`numba.njit` with the signature kept for the type checker."""
    return cast(Function, numba.njit(cache=True, nogil=True, fastmath=False, error_model="numpy")(function))


@compiled
def average_entry(entry: float, before: float, traded: float, paid: float) -> float:
    """Average price of one open position after a trade."""
    if traded == 0.0:
        return entry if before != 0.0 else 0.0
    after = before + traded
    if after == 0.0:
        return 0.0
    if before * traded > 0.0:
        return (entry * before + paid * traded) / after
    if before * after <= 0.0:
        return paid
    return entry


@compiled
def advance(
    t: npt.NDArray[np.int64],
    action: Array,
    cash: Array,
    units: Array,
    entry: Array,
    tape: Tape,
    rates: CostRates,
    limits: Limits,
    out: Array,
) -> None:
    """Every account from the close of its bar t to the close of t+1, in place.

    t: (N,); action, units, entry: (N, A); cash: (N,); the tape is read at t and t+1
    out: (4, N) equity at the close of t+1, costs, turnover, fees
    """
    n_envs, n_assets = units.shape
    for n in range(n_envs):
        now = t[n]
        then = now + 1
        worth = cash[n]
        for a in range(n_assets):
            worth = worth + units[n, a] * tape.mark[now, a]
        gross = 0.0
        for a in range(n_assets):
            gross = gross + abs(min(max(action[n, a], limits.lowest), 1.0))
        scale = limits.gross_cap / gross if gross > limits.gross_cap else 1.0

        money = cash[n]
        costs = fees = traded_value = 0.0
        for a in range(n_assets):
            if not tape.fillable[then, a]:
                continue
            weight = min(max(action[n, a], limits.lowest), 1.0) * scale
            before = units[n, a]
            if not abs(weight - before * tape.mark[now, a] / worth) > limits.band:
                continue
            traded = weight * worth / tape.mark[now, a] - before
            size = abs(traded)
            price = tape.open[then, a]
            participation = min(size * price / max(tape.bar_value[now, a], 1e-300), 1.0)
            adverse = rates.adverse + rates.impact * tape.sigma[now, a] * np.sqrt(participation)
            paid = price * (1.0 + np.sign(traded) * adverse)
            fee = rates.fee * size * paid
            money = money - traded * paid - fee
            costs = costs + (size * price * adverse + fee)
            fees = fees + fee
            traded_value = traded_value + size * price
            entry[n, a] = average_entry(entry[n, a], before, traded, paid)
            units[n, a] = before + traded

        gross = borrowed = 0.0
        for a in range(n_assets):
            notional = units[n, a] * tape.mark[then, a]
            gross = gross + abs(notional)
            borrowed = borrowed + max(-notional, 0.0)
        holding = rates.funding * gross + rates.borrow * (borrowed + max(-money, 0.0))
        cash[n] = money - holding

        value = cash[n]
        for a in range(n_assets):
            value = value + units[n, a] * tape.mark[then, a]
        out[0, n] = value
        out[1, n] = costs + holding
        out[2, n] = traded_value / worth
        out[3, n] = fees


@compiled
def follow(
    first: int,
    targets: Array,
    initial_cash: float,
    tape: Tape,
    rates: CostRates,
    limits: Limits,
    record: Array,
    held: Array,
) -> int:
    """One account that is told a target weight at every bar from `first` on; returns the steps taken before ruin.

    targets, held: (S, A), held being the weights after the step; record: (S, 4) equity, costs, turnover, fees
    """
    n_steps, n_assets = targets.shape
    t = np.full(1, first, dtype=np.int64)
    cash = np.full(1, initial_cash)
    units, entry = np.zeros((1, n_assets)), np.zeros((1, n_assets))
    out = np.zeros((4, 1))
    for s in range(len(targets)):
        advance(t, targets[s : s + 1], cash, units, entry, tape, rates, limits, out)
        t[0] += 1
        record[s] = out[:, 0]
        for a in range(n_assets):
            held[s, a] = units[0, a] * tape.mark[t[0], a] / out[0, 0]
        if out[0, 0] <= limits.ruin:
            n_steps = s + 1
            break
    return int(n_steps)
