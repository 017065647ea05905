"""Replay target weights in vectorbt: run by test_engines.py in a venv of its own. Arguments: input.npz output.npz."""

import sys

import numpy as np
import pandas as pd
import vectorbt as vbt

given = np.load(sys.argv[1])
n_bars, n_assets = given["close"].shape
index = pd.date_range("2020-01-01", periods=n_bars, freq="h")


def frame(values):
    return pd.DataFrame(values, index=index, columns=range(n_assets))


size = np.full((n_bars, n_assets), np.nan)  # no order
size[1:] = np.where(given["fillable"][1:], given["weights"][:-1], np.nan)  # decided at the close before
seen = np.vstack([given["close"][:1], given["close"][:-1]])  # value and size orders at that close
portfolio = vbt.Portfolio.from_orders(
    frame(given["close"]),
    size=frame(size),
    size_type="targetpercent",
    price=frame(given["open"]),
    val_price=frame(seen),
    fees=float(given["fee"]),
    slippage=float(given["adverse"]),
    init_cash=float(given["cash"]),
    cash_sharing=True,
    group_by=True,
    update_value=False,
    freq="h",
)
orders = portfolio.orders.records
fees = np.bincount(orders["idx"].to_numpy(), weights=orders["fees"].to_numpy(), minlength=n_bars)
np.savez(sys.argv[2], equity=np.asarray(portfolio.value()).reshape(-1), fees=fees, n_orders=len(orders))
