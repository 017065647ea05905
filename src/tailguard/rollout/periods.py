"""Risk periods: the return X of an episode, or of a named number of steps, as it builds up step by step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailguard.loops import compiled

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
    n_steps, n_envs = rewards.shape
    before, steps = np.zeros((n_steps + 1, n_envs)), np.zeros((n_steps + 1, n_envs))
    ended, cut = np.zeros(rewards.shape, np.bool_), np.zeros(rewards.shape, np.bool_)
    before[0], steps[0] = so_far, elapsed
    walk(rewards, terminated, truncated, 0 if horizon is None else horizon, before, steps, ended, cut)
    return Periods(before, steps, ended, cut, (before[:-1] + rewards)[ended], (steps[:-1] + 1.0)[ended])


@compiled
def walk(rewards, terminated, truncated, horizon, before, steps, ended, cut):  # type: ignore[no-untyped-def]
    """Fill all but the first rows of where periods stand before each step, and which steps end or cut one.

    horizon: 0 for the episode
    """
    for t in range(len(rewards)):
        for n in range(rewards.shape[1]):
            after, count = before[t, n] + rewards[t, n], steps[t, n] + 1.0
            whole = count >= horizon if horizon else truncated[t, n]
            ended[t, n] = terminated[t, n] or whole
            cut[t, n] = truncated[t, n] and not ended[t, n]
            over = ended[t, n] or cut[t, n]
            before[t + 1, n], steps[t + 1, n] = (0.0, 0.0) if over else (after, count)


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
