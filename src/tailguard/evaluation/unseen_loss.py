"""Losses that a record has not met yet: how large one may be, and how good a record must be to stand it.

A loss that comes with probability p per bar is missing from a record of n bars with probability exp(-p n). Such a
record says nothing about the loss, so a verdict must allow for it: the mean it has to beat is the largest over all p of
what the loss would take from a bar, p times its size, and of the sampling noise that is still to be expected when the
absence of the loss was itself luck.
"""

from __future__ import annotations

from functools import cache
from math import exp, inf, log

import numpy as np
import numpy.typing as npt

from tailguard.losses.normal import normal_quantile

Array = npt.NDArray[np.float64]

UNSEEN_LOSS = 0.12
"""Share of what is held that a bar may take although no known bar did, as on the worst day of the S&P 500 since 1987.
`python -m benchmarks.judge` compares other shares."""
FALSE_SKILL = 0.05
"""Probability with which a record without skill may pass."""
N_RATES = 60
MOST_WEIGHT_ROWS = 200


def unseen_loss(weights: npt.ArrayLike, bar_returns: npt.ArrayLike | None = None) -> float:
    """Loss of one bar that the held weights may meet, as a part of equity: never less than 12 % of what is held.

    weights:     (S, A) held
    bar_returns: (T, A) every known bar of the symbols, those of the training too: the worst of them at the weights
                 held, averaged over the weights, counts where it is larger

    Returns without weights (all zero, or not finite) count as those of an account that is fully invested.
    """
    held = np.asarray(weights, dtype=np.float64)
    held = held[np.isfinite(held).all(axis=1)]
    gross = float(np.abs(held).sum(axis=1).mean()) if len(held) else 0.0
    if gross == 0.0:
        return UNSEEN_LOSS
    loss = UNSEEN_LOSS * gross
    if bar_returns is not None:
        known = np.nan_to_num(np.asarray(bar_returns, dtype=np.float64))
        rows = held[np.linspace(0, len(held) - 1, min(len(held), MOST_WEIGHT_ROWS)).astype(np.int64)]
        if len(known):
            loss = max(loss, float(np.mean([-(known @ row).min() for row in rows])))
    return min(loss, gross)


def smallest_mean(standard_error: float, n_bars: float, loss: float) -> float:
    """Mean return of a bar above which at most 5 % of records lie whose true mean is zero because of an unseen loss.

    standard_error: of the mean, from the record itself
    loss:           size of the loss, as a part of equity

    With k = p n losses to expect, the record misses them with probability exp(-k), and its mean then lies k loss / n
    above the true one. So it may exceed its mean by z(1 - 0.05 exp(k)) standard errors: the answer is the largest sum
    of the two over k. Where the loss is small against the noise, that is the usual test (k = 0).
    """
    expected, noise = _rates()
    return float((expected * loss / n_bars + noise * standard_error).max())


def bars_to_stand(mean: float, standard_error: float, n_bars: int, loss: float) -> float:
    """Length that a record of this mean and noise needs for its mean to exceed `smallest_mean`; infinite for a loss."""
    if mean <= 0.0:
        return inf

    def stands(n: float) -> bool:
        return mean >= smallest_mean(standard_error * (n_bars / n) ** 0.5, n, loss)

    high = 2.0
    while not stands(high):
        high *= 2.0
        if high > 1e15:
            return inf
    low = 0.5 * high
    while high - low > 0.5:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if stands(middle) else (middle, high)
    return float(np.ceil(high))


@cache
def _rates() -> tuple[Array, Array]:
    """(K,) numbers of losses to expect in a record that meets none, and the noise left for each in deviations."""
    expected = np.linspace(0.0, -log(FALSE_SKILL) - 1e-3, N_RATES)
    return expected, np.array([float(normal_quantile(1.0 - FALSE_SKILL * exp(k))) for k in expected])
