"""The simple rule that an agent has to beat: a ridge regression of the next return on the same features.

It is fitted on train by closed form. How strongly it is shrunk, whether each symbol sees the features of all of them,
how much is held per unit of forecast and within which band nothing is traded is chosen on validation, net of the same
costs under the same rules of the account; not to trade at all is one of the choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from tailguard.env import AccountRules
from tailguard.env.dataset import Dataset
from tailguard.evaluation import measures
from tailguard.evaluation.backtest import Backtest, follow_targets

Array = npt.NDArray[np.float64]

SHRINKAGES = (0.01, 0.1, 1.0, 10.0)
"""Ridge penalty as a multiple of the mean square of a feature."""
GAINS = (0.5, 2.0)
"""Weight held at a forecast of one deviation, as a part of a symbol's share of the account."""
BANDS = (0.0, 0.25, 0.5)
"""No-trade bands, as a part of a symbol's share of the account."""
CHOOSING_PART = 0.25
"""Last part of train on which settings are chosen where there is no validation."""


@dataclass(frozen=True)
class RidgeRule:
    """A fitted rule: what it would hold at every bar, and how."""

    data: Dataset
    targets: Array
    """(T, A) weights wanted at the close of each bar."""
    account: AccountRules
    settings: str
    """What was chosen, in words."""

    def run(self, start: int, stop: int) -> Backtest:
        """Decide at the closes of bars start .. stop - 1, with the costs of the data."""
        return follow_targets(
            self.data.bars, self.targets[start:stop], start, costs=self.data.config.costs, account=self.account
        )


def fit_ridge(data: Dataset) -> RidgeRule:
    """The rule that earned the best Sharpe ratio on validation among those fitted on train."""
    train, validation = data.split.train, data.split.validation
    fit_stop, choose = train.stop, validation
    if choose is None or not len(choose):
        fit_stop = train.start + round(len(train) * (1.0 - CHOOSING_PART))
        first, last = min(fit_stop + 2, train.stop - 1), train.stop  # a return reaches two bars ahead
    else:
        first, last = choose.start, choose.stop
    symbols = len(data.bars.symbols)
    best, best_sharpe = RidgeRule(data, np.zeros_like(data.bars.close), data.config.account, "does not trade"), 0.0
    for shared, shrinkage in product((False, True) if symbols > 1 else (False,), SHRINKAGES):
        forecast = forecasts(data, slice(train.start, fit_stop), shrinkage, shared)
        for gain, band in product(GAINS, BANDS):
            targets = np.clip(gain * forecast, -1.0, 1.0) / symbols
            own = data.config.account
            account = own.replace(no_trade_band=max(own.no_trade_band, band / symbols))
            words = f"penalty {shrinkage:g}, {gain:g} per deviation of the forecast, band {account.no_trade_band:g}"
            rule = RidgeRule(data, targets, account, words + (", features of all symbols" if shared else ""))
            found = rule.run(first, last)
            sharpe = measures.sharpe(found.returns, found.bars_per_year) if len(found) > 1 else 0.0
            if sharpe > best_sharpe:
                best, best_sharpe = rule, sharpe
    return best


def forecasts(data: Dataset, rows: slice, shrinkage: float, shared: bool) -> Array:
    """(T, A) forecasts of the return from the next open to the one after it, in deviations over `rows`.

    shared: each symbol has coefficients of its own on the features of all symbols; else all symbols share one vector
            of coefficients on their own features
    """
    known = np.nan_to_num(data.features.astype(np.float64))
    n, symbols, _ = known.shape
    earned = next_returns(data)
    if shared:
        inputs = known.reshape(n, -1)
        out = np.stack([_ridge(inputs[rows], earned[rows, a], inputs, shrinkage) for a in range(symbols)], axis=1)
    else:
        inputs = known.reshape(n * symbols, -1)
        fitted = known[rows].reshape(-1, known.shape[-1])
        out = _ridge(fitted, earned[rows].reshape(-1), inputs, shrinkage).reshape(n, symbols)
    spread = float(out[rows].std())
    return out / spread if spread > 0.0 else np.zeros_like(out)


def next_returns(data: Dataset) -> Array:
    """(T, A) from the open at which a decision of bar t is filled to the next open; NaN where there is none."""
    opens = np.where(data.bars.tradable, data.bars.open, np.nan)
    earned = np.full_like(opens, np.nan)
    earned[:-2] = opens[2:] / opens[1:-1] - 1.0
    return earned


def _ridge(inputs: Array, wanted: Array, asked: Array, shrinkage: float) -> Array:
    """Forecasts at `asked` of a regression without penalty on its mean; the mean itself is left out of a forecast."""
    usable = np.isfinite(wanted)
    x, y = inputs[usable], wanted[usable]
    if len(y) < 2:
        return np.zeros(len(asked))
    centre = x.mean(axis=0)
    x = x - centre
    gram = x.T @ x
    penalty = shrinkage * float(np.trace(gram)) / len(gram)
    if penalty <= 0.0:
        return np.zeros(len(asked))
    coefficients = np.linalg.solve(gram + penalty * np.eye(len(gram)), x.T @ (y - y.mean()))
    return np.asarray((asked - centre) @ coefficients)
