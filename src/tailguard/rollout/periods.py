"""Risk periods: the return X of an episode, or of a named number of steps, as it builds up step by step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailguard.kernels.scans import reverse_scan

Floats = NDArray[np.floating[Any]]
Bools = NDArray[np.bool_]


class Periods(NamedTuple):
    """The periods of one rollout (T, N)."""

    so_far: Floats  # (T + 1, N) X before each step; the last row after the rollout
    elapsed: Floats  # (T + 1, N) steps of the period before each step
    ended: Bools  # (T, N) the step completed a period
    cut: Bools  # (T, N) the step's episode was truncated inside a period
    returns: Floats  # (P,) X of the periods that were completed, in order of time
    lengths: Floats  # (P,) their steps


def walk_periods(
    rewards: Floats, terminated: Bools, truncated: Bools, so_far: Floats, elapsed: Floats, horizon: int | None
) -> Periods:
    """Sum rewards per period, undiscounted (docs/risk.md).

    so_far, elapsed: (N,) where the periods stand before the first step
    horizon:         steps of a period; None: the episode

    A termination completes a period however short it is, so that ruin counts. A truncation completes an episode; inside
    a named horizon it only cuts the period, whose return stays unknown.
    """
    position = np.arange(1.0, len(rewards) + 1.0)[:, None]  # steps since the rollout began
    ends = np.where(terminated | truncated, position, 0.0)
    begun = shifted(np.maximum.accumulate(ends, axis=0), np.zeros(len(so_far)))[:-1]  # where each episode did
    inherited = elapsed if horizon is None else np.minimum(elapsed, horizon - 1.0)
    position = position - begun + np.where(begun == 0.0, inherited, 0.0)  # steps of the episode, this one included
    if horizon is not None:
        position = position % horizon
    ended = terminated | (truncated if horizon is None else position == 0.0)
    cut = truncated & ~ended
    over = ended | cut
    kept = shifted(~over, np.zeros(len(so_far), np.bool_))[:-1]
    terms = np.concatenate([rewards[:1] + so_far, rewards[1:]])
    returns = reverse_scan(terms[::-1], kept[::-1], np.zeros(len(so_far)))[::-1]  # X after each step
    before = shifted(np.where(over, 0.0, returns), so_far)
    steps = shifted(np.where(over, 0.0, position), elapsed)
    return Periods(before, steps, ended, cut, returns[ended], (steps[:-1] + 1.0)[ended])


def shifted(rows: NDArray[Any], first: NDArray[Any]) -> NDArray[Any]:
    """(T + 1, N) rows one step later, after `first` (N,)."""
    return np.concatenate([first[None], rows])


def risk_rewards(rewards: Floats, so_far: Floats, threshold: float, alpha: float) -> Floats:
    """-(1/alpha) * [(nu - X_{t+1})+ - (nu - X_t)+]: what each step adds to CVaR's tail term (docs/risk.md, eq. R2).

    rewards, so_far: (T, N) reward of each step and X before it
    returns:         (T, N); the sum over a period telescopes to (nu+ - (nu - X)+) / alpha, undiscounted

    At alpha = 1 every outcome is in the tail and the stream is the rewards themselves.
    """
    if alpha == 1.0:
        return rewards
    shortfall, before = np.maximum(threshold - (so_far + rewards), 0.0), np.maximum(threshold - so_far, 0.0)
    stream: Floats = (before - shortfall) / alpha
    return stream
