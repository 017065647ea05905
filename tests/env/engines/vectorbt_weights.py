"""Follow exported weights in vectorbt: run by test_engines.py in a venv of its own; only pandas reads the files.

Arguments: weights.csv bars.csv fee adverse output.npz
"""

import sys

import numpy as np
import pandas as pd
import vectorbt as vbt

weights = pd.read_csv(sys.argv[1], parse_dates=["decided_at", "fill_at"])
bars = pd.read_csv(sys.argv[2], parse_dates=["ts"])
fee, adverse = float(sys.argv[3]), float(sys.argv[4])

opens, closes = (bars.pivot(index="ts", columns="symbol", values=name) for name in ("open", "close"))
marks = closes.ffill().fillna(1.0)
size = weights.pivot(index="fill_at", columns="symbol", values="weight").reindex(opens.index)[opens.columns]
size = size.where(opens.notna())  # no bar, no order
portfolio = vbt.Portfolio.from_orders(
    marks,
    size=size,
    size_type="targetpercent",
    price=opens.fillna(marks),
    val_price=marks.shift(1).fillna(1.0),  # sized at the close before
    fees=fee,
    slippage=adverse,
    init_cash=100_000.0,
    cash_sharing=True,
    group_by=True,
    update_value=False,
)
value = np.asarray(portfolio.value()).reshape(-1)
filled = opens.index.isin(weights["fill_at"])
np.savez(sys.argv[5], equity=value[filled] / 100_000.0, n_orders=len(portfolio.orders.records))
