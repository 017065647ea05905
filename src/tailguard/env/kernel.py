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
N_TAPE, N_BEFORE_LIMITS = len(Tape._fields), len(Tape._fields) + len(CostRates._fields)
Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """`numba.njit` with the signature kept for the type checker."""
    return cast(Function, numba.njit(cache=True, nogil=True, fastmath=False, error_model="numpy")(function))


@compiled
def equity(cash: float, units: Array, mark: Array) -> float:
    """Value of one account at these prices (A,), added from the first asset to the last."""
    worth = cash
    for a in range(units.size):
        worth = worth + units[a] * mark[a]
    return worth


@compiled
def bounded(action: float, limits: Limits) -> float:
    """The weight that an action (one number) asks for, before the gross cap."""
    return min(max(action, limits.lowest), 1.0)


@compiled
def scale_to_cap(action: Array, limits: Limits) -> float:
    """What brings the weights that an action (A,) asks for under the gross cap, all alike."""
    gross = 0.0
    for a in range(action.size):
        gross = gross + abs(bounded(action[a], limits))
    return limits.gross_cap / gross if gross > limits.gross_cap else 1.0


@compiled
def order_units(weight: float, held: float, worth: float, mark: float, band: float) -> float:
    """Units of one asset to trade, decided at the close; none inside the no-trade band."""
    if not abs(weight - held * mark / worth) > band:
        return 0.0
    return weight * worth / mark - held


@compiled
def fill(traded: float, price: float, sigma: float, bar_value: float, rates: CostRates) -> tuple[float, float, float]:
    """(price paid, fee, cost of the adverse move) of one order that meets the market at `price`."""
    size = abs(traded)
    participation = min(size * price / max(bar_value, 1e-300), 1.0)
    adverse = rates.adverse + rates.impact * sigma * np.sqrt(participation)
    paid = price * (1.0 + np.sign(traded) * adverse)
    return paid, rates.fee * size * paid, size * price * adverse


@compiled
def average_entry(entry: float, before: float, traded: float, paid: float) -> float:
    """Average price of one open position after a trade that is not zero."""
    after = before + traded
    if after == 0.0:
        return 0.0
    if before * traded > 0.0:
        return (entry * before + paid * traded) / after
    if before * after <= 0.0:
        return paid
    return entry


@compiled
def carry(cash: float, units: Array, mark: Array, rates: CostRates) -> float:
    """Cost of holding one account's positions (A,) over a bar: funding on all, borrow on what is short or lent."""
    gross = borrowed = 0.0
    for a in range(units.size):
        notional = units[a] * mark[a]
        gross = gross + abs(notional)
        borrowed = borrowed + max(-notional, 0.0)
    return rates.funding * gross + rates.borrow * (borrowed + max(-cash, 0.0))


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
        now, then = t[n], t[n] + 1
        money = cash[n]
        worth, scale = equity(money, units[n], tape.mark[now]), scale_to_cap(action[n], limits)
        costs = fees = traded_value = 0.0
        for a in range(n_assets):
            weight, held, price = bounded(action[n, a], limits) * scale, units[n, a], tape.open[then, a]
            traded = order_units(weight, held, worth, tape.mark[now, a], limits.band)
            if traded == 0.0 or not tape.fillable[then, a]:
                continue
            paid, fee, moved = fill(traded, price, tape.sigma[now, a], tape.bar_value[now, a], rates)
            money = money - traded * paid - fee
            entry[n, a], units[n, a] = average_entry(entry[n, a], held, traded, paid), held + traded
            costs, fees, traded_value = costs + (moved + fee), fees + fee, traded_value + abs(traded) * price
        holding = carry(money, units[n], tape.mark[then], rates)
        cash[n] = money - holding
        out[0, n] = equity(cash[n], units[n], tape.mark[then])
        out[1, n], out[2, n], out[3, n] = costs + holding, traded_value / worth, fees


@compiled
def end_bar(
    t: npt.NDArray[np.int64],
    steps: npt.NDArray[np.int64],
    equity_now: Array,
    ruin: float,
    length: int,
    ended: npt.NDArray[np.bool_],
) -> int:
    """Every clock a bar further, in place; fills `ended` (2, N), by ruin and at all, and returns how many are."""
    n_ended = 0
    for n in range(t.size):
        t[n] += 1
        steps[n] += 1
        ended[0, n] = equity_now[n] <= ruin
        ended[1, n] = ended[0, n] or steps[n] >= length
        n_ended += ended[1, n]
    return n_ended


@compiled
def finite(values: Array) -> bool:
    """Every number of an array of two axes."""
    for row in values:
        for value in row:
            if not np.isfinite(value):
                return False
    return True


@compiled
def close_bar(
    t: npt.NDArray[np.int64],
    left: npt.NDArray[np.int64],
    steps: npt.NDArray[np.int64],
    action: Array,
    cash: Array,
    units: Array,
    entry: Array,
    out: Array,
    growth: Array,
    ended: npt.NDArray[np.bool_],
    *rules: Any,
) -> int:
    """`advance`, the growth of equity (N,) in it, and `end_bar`.

    left:  (N,) takes the bars that the step leaves
    rules: bars of an episode, the equity that counts where there is less, and all of Tape, CostRates and Limits, one by
           one: numba asks four times as much for named tuples
    """
    length, least, market = rules[0], rules[1], rules[2:]
    tape, rates = Tape(*market[:N_TAPE]), CostRates(*market[N_TAPE:N_BEFORE_LIMITS])
    limits, equity_now = Limits(*market[N_BEFORE_LIMITS:]), out[0]
    for n in range(t.size):
        left[n], growth[n] = t[n], equity_now[n]
    advance(t, action, cash, units, entry, tape, rates, limits, out)
    for n in range(t.size):
        growth[n] = np.maximum(equity_now[n], least) / growth[n]
    return end_bar(t, steps, equity_now, limits.ruin, length, ended)


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
