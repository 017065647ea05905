"""The accounting of `accounting.py` in place, bar by bar: by the native core where it is there, else by numpy.

Every operation of the core rounds as it does in numpy, so the two agree bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tailguard.env.accounting import Account, Limits, equity
from tailguard.env.accounting import advance as definition
from tailguard.env.costs import CostRates
from tailguard.env.tape import Tape
from tailguard.kernels import native

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Observation = npt.NDArray[np.float32]


class Accounts(NamedTuple):
    """N accounts of A assets in the middle of their episodes; the functions of this module change the arrays."""

    t: Ints  # (N,) current bar
    steps: Ints  # (N,) of the episode so far
    cash: Array  # (N,)
    units: Array  # (N, A)
    entry: Array  # (N, A) average price of what is held
    result: Array  # (4, N) equity now; costs, turnover and fees of the last step
    period_return: Array  # (N,) sum of the episode's rewards


def new_accounts(initial_cash: float, n_envs: int, n_assets: int, bar: int = 0) -> Accounts:
    """N accounts of cash alone at the close of a bar."""
    accounts = Accounts(
        t=np.full(n_envs, bar, dtype=np.int64),
        steps=np.zeros(n_envs, dtype=np.int64),
        cash=np.full(n_envs, initial_cash),
        units=np.zeros((n_envs, n_assets)),
        entry=np.zeros((n_envs, n_assets)),
        result=np.zeros((4, n_envs)),
        period_return=np.zeros(n_envs),
    )
    accounts.result[0] = initial_cash
    return accounts


def advance(accounts: Accounts, action: Array, tape: Tape, rates: CostRates, limits: Limits) -> None:
    """Every account from the close of its bar t to the close of t + 1, by the definition; action: (N, A)."""
    prices = tape.at(accounts.t)
    before = Account(accounts.cash, accounts.units, accounts.entry)
    after, bill = definition(before, action, prices, rates, limits)
    accounts.cash[:], accounts.units[:], accounts.entry[:] = after
    accounts.result[:] = equity(after, prices.next_mark), *bill
    accounts.t[:] += 1


def close_bar(
    accounts: Accounts, action: Array, tape: Tape, rates: CostRates, limits: Limits, length: int, least_equity: float
) -> tuple[Array, Bools, int]:
    """Every account from the close of its bar t to the close of t + 1, and which episodes end there.

    action:       (N, A) target weights, finite
    length:       bars of an episode
    least_equity: what counts where there is less
    returns:      (N,) factor by which equity grew; (2, N) ended by ruin, ended at all; how many ended
    """
    growth, ended = np.empty(len(accounts.t)), np.empty((2, len(accounts.t)), np.bool_)
    core = native()
    if core is not None:
        return growth, ended, core.close_bar(accounts, action, tape, rates, limits, length, least_equity, growth, ended)
    before = accounts.result[0].copy()
    advance(accounts, action, tape, rates, limits)
    np.divide(np.maximum(accounts.result[0], least_equity), before, out=growth)
    accounts.steps[:] += 1
    ended[0] = accounts.result[0] <= limits.ruin
    ended[1] = ended[0] | (accounts.steps >= length)
    return growth, ended, int(ended[1].sum())


def observe(accounts: Accounts, rows: Observation, mark: Array, length: int, columns: Ints, size: int) -> Observation:
    """(N, D) what the agents see: features of bar t, then what each account looks like at its close.

    rows:    (T, F) features
    columns: (4,) first column of weights, unrealised returns, time left and period return, -1 where left out
    size:    D
    """
    out = np.empty((len(accounts.t), size), np.float32)
    core = native()
    if core is not None:
        core.observe(accounts, rows, mark, length, columns, out)
        return out
    price, worth = mark[accounts.t], accounts.result[0][:, None]
    account = (
        accounts.units * price / worth,
        100.0 * accounts.units * (price - accounts.entry) / worth,
        ((length - accounts.steps) / length)[:, None],
        (100.0 * accounts.period_return)[:, None],
    )
    out[:, : rows.shape[1]] = rows[accounts.t]
    for column, shown in zip(columns.tolist(), account, strict=True):
        if column >= 0:
            out[:, column : column + shown.shape[1]] = shown
    return out


def follow(
    first: int, targets: Array, initial_cash: float, tape: Tape, rates: CostRates, limits: Limits
) -> tuple[Array, Array, int]:
    """One account that is told a target weight (S, A) at every bar from `first` on, until the last or ruin.

    returns: (S, 4) equity, costs, turnover, fees of each step, (S, A) weights held after it, and the steps taken
    """
    n_steps, n_assets = targets.shape
    record, held = np.zeros((n_steps, 4)), np.zeros((n_steps, n_assets))
    accounts = new_accounts(initial_cash, 1, n_assets, first)
    core = native()
    if core is not None:
        return record, held, core.follow(accounts, targets, tape, rates, limits, record, held)
    for step in range(n_steps):
        advance(accounts, targets[step : step + 1], tape, rates, limits)
        record[step] = accounts.result[:, 0]
        held[step] = accounts.units[0] * tape.mark[accounts.t[0]] / record[step, 0]
        if record[step, 0] <= limits.ruin:
            return record, held, step + 1
    return record, held, n_steps
