"""One account per environment, many assets, one pot of cash: pure functions of arrays.

N environments, A assets. Time goes from close[t] to close[t+1]:

1. decide    a target weight per asset, at close[t];
2. size      weight * equity / price, both marked at close[t], so the order is a number of units;
3. fill      at open[t+1], moved against the trader by spread, slippage and impact; the fee is paid on the fill;
4. carry     funding and borrow, on the position as marked at close[t+1];
5. mark      equity = cash + units * close[t+1].

A bar that is missing fills nothing, nor does one whose open lies in a no-trade window: the position stays, and is
marked at the last known price.

This module is the definition. `kernel.py` computes the same in the native core, and a test holds the two together bit
for bit, so sums over assets run from the first to the last here too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tailguard.configuration import Config, Fraction, PositiveFloat, UnitInterval
from tailguard.env.costs import CostRates
from tailguard.env.no_trade import NoTradeWindow

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


class AccountRules(Config):
    """What an account may hold and when it is over."""

    initial_cash: PositiveFloat = 100_000.0
    """Equity at the start of an episode, in the currency of the prices."""
    long_only: bool = False
    """Weights in [0, 1] instead of [-1, 1]."""
    gross_cap: PositiveFloat = 1.0
    """Largest sum of absolute target weights; a larger target is scaled down as a whole."""
    no_trade_band: UnitInterval = 0.0
    """An asset whose weight is within this distance of its target is not traded."""
    no_trade_windows: tuple[NoTradeWindow, ...] = ()
    """Times in UTC at which no order is sent: "21:55-22:10" of every day, "Fri 20:00-Sun 23:00" of every week. An order
    that would fill at an open inside one lapses and positions stay; such steps are not learned from."""
    ruin_fraction: Fraction = 0.1
    """The episode ends, as a termination, when equity falls to this part of its start."""


class Limits(NamedTuple):
    """`AccountRules` as plain numbers, in the form that the kernel takes."""

    lowest: float
    gross_cap: float
    band: float
    ruin: float


def limits_of(rules: AccountRules) -> Limits:
    return Limits(
        lowest=0.0 if rules.long_only else -1.0,
        gross_cap=float(rules.gross_cap),
        band=float(rules.no_trade_band),
        ruin=rules.ruin_fraction * rules.initial_cash,
    )


class Account(NamedTuple):
    """What is owned. Equity is not a third fact: it is cash + units * price."""

    cash: Array  # (N,)
    units: Array  # (N, A), negative when short
    entry: Array  # (N, A), average price paid for the open position


class Bill(NamedTuple):
    """What one step cost and how much it traded."""

    costs: Array  # (N,) currency: spread, slippage, impact, fee, funding, borrow
    turnover: Array  # (N,) traded notional over equity
    fees: Array  # (N,) currency: the fee alone, which independent engines report too


def new_account(initial_cash: float, n_envs: int, n_assets: int) -> Account:
    return Account(np.full(n_envs, float(initial_cash)), np.zeros((n_envs, n_assets)), np.zeros((n_envs, n_assets)))


def sum_assets(x: Array) -> Array:
    """(N, A) -> (N,), from the first asset to the last, as the native kernel adds."""
    total = np.zeros(x.shape[0])
    for a in range(x.shape[1]):
        total = total + x[:, a]
    return total


def equity(account: Account, price: Array) -> Array:
    """(N,) value of the account at `price` (N, A)."""
    total = account.cash
    for a in range(price.shape[1]):
        total = total + account.units[:, a] * price[:, a]
    return total


def target_weights(action: Array, limits: Limits) -> Array:
    """(N, A) action -> weights inside their bounds, scaled down as a whole to the gross cap."""
    weight = np.minimum(np.maximum(action, limits.lowest), 1.0)
    gross = sum_assets(np.abs(weight))
    scale = np.where(gross > limits.gross_cap, limits.gross_cap / np.maximum(gross, limits.gross_cap), 1.0)
    return weight * scale[:, None]


def requested_weights(action: npt.ArrayLike, held: npt.ArrayLike, limits: Limits) -> Array:
    """(N, A) weights that the account is asked to hold: what leaves the product, never the raw action.

    action: (N, A) what a policy answered at the close
    held:   (N, A) weights held at that close
    returns: the action inside its bounds and under the gross cap; `held` where that is within the no-trade band of it
    """
    now = np.asarray(held, dtype=np.float64)
    weight = target_weights(np.asarray(action, dtype=np.float64), limits)
    return np.where(np.abs(weight - now) > limits.band, weight, now)


def order_units(account: Account, action: Array, worth: Array, mark: Array, fillable: Mask, limits: Limits) -> Array:
    """(N, A) units to trade, decided at the close: `worth` (N,) and `mark` (N, A) are those of the close."""
    held = account.units * mark / worth[:, None]
    weight = requested_weights(action, held, limits)
    return np.where(fillable & (weight != held), weight * worth[:, None] / mark - account.units, 0.0)


def fill(
    account: Account, traded: Array, price: Array, sigma: Array, bar_value: Array, rates: CostRates
) -> tuple[Account, Array, Array]:
    """Trade `traded` units near `price`; returns the account, costs (N,) and fees (N,).

    sigma:     (N, A) volatility of a bar
    bar_value: (N, A) currency traded in a usual bar
    """
    size = np.abs(traded)
    participation = np.minimum(size * price / np.maximum(bar_value, 1e-300), 1.0)
    adverse = rates.adverse + rates.impact * sigma * np.sqrt(participation)
    paid = price * (1.0 + np.sign(traded) * adverse)
    fee = rates.fee * size * paid
    cash = account.cash
    for a in range(traded.shape[1]):
        cash = cash - traded[:, a] * paid[:, a] - fee[:, a]
    after = Account(cash, account.units + traded, average_entry(account, traded, paid))
    return after, sum_assets(size * price * adverse + fee), sum_assets(fee)


def average_entry(account: Account, traded: Array, paid: Array) -> Array:
    """Average price of the open position: moved by what adds to it, kept by what reduces it, new after a flip."""
    before, after = account.units, account.units + traded
    adds = before * traded > 0.0
    crosses = before * after <= 0.0
    blended = (account.entry * before + paid * traded) / np.where(after == 0.0, 1.0, after)
    entry = np.where(adds, blended, np.where(crosses, paid, account.entry))
    return np.where(after == 0.0, 0.0, np.where(traded == 0.0, account.entry, entry))


def carry(account: Account, price: Array, rates: CostRates) -> tuple[Account, Array]:
    """Funding on the absolute notional, borrow on short notional and on cash below zero; returns the cost (N,)."""
    notional = account.units * price
    gross = sum_assets(np.abs(notional))
    borrowed = sum_assets(np.maximum(-notional, 0.0)) + np.maximum(-account.cash, 0.0)
    cost = rates.funding * gross + rates.borrow * borrowed
    return account._replace(cash=account.cash - cost), cost


class Prices(NamedTuple):
    """What one step reads of the market, each (N, A)."""

    mark: Array  # close[t], or the last known one
    open: Array  # open[t+1]; read only where fillable
    next_mark: Array  # close[t+1], or the last known one
    fillable: Mask  # bar t+1 exists and a price was known at t
    sigma: Array  # at t
    bar_value: Array  # at t


def advance(account: Account, action: Array, prices: Prices, rates: CostRates, limits: Limits) -> tuple[Account, Bill]:
    """The five stages, from the close of t to the close of t+1."""
    worth = equity(account, prices.mark)
    traded = order_units(account, action, worth, prices.mark, prices.fillable, limits)
    account, trade_costs, fees = fill(account, traded, prices.open, prices.sigma, prices.bar_value, rates)
    account, holding_costs = carry(account, prices.next_mark, rates)
    turnover = sum_assets(np.abs(traded) * prices.open) / worth
    return account, Bill(trade_costs + holding_costs, turnover, fees)
