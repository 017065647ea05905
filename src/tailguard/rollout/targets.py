"""Critic targets: samples of the law of the return, not of an average of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailguard.kernels.scans import reverse_scan
from tailguard.losses.risk import interpolation_weights

Floats = NDArray[np.floating[Any]]
Bools = NDArray[np.bool_]
Ints = NDArray[np.integer[Any]]

N_HORIZON_ROWS = 1024
"""Rows of horizons drawn per rollout; steps of a larger one share them, far apart and with other rewards."""


def return_law_samples(
    rewards: Floats,
    law: Floats,
    terminal_law: Mapping[tuple[int, int], Floats],
    dones: Bools,
    gamma: float,
    lam: float,
    levels: Sequence[float],
    rng: np.random.Generator,
    valid: Bools | None = None,
) -> Floats:
    """K samples of each step's return, each with a horizon k and a level of its own (docs/algorithm.md, eq. 6):

        target = sum of k discounted rewards + gamma^k * the law predicted there, at the sample's level

    Averaging over k, as a lambda-return does, would shrink the spread; drawing it keeps the law. A step's horizons are
    stratified over Geometric(1 - lam), cut at episode or rollout end, and its levels over (0, 1): every sample has the
    law of a single draw, and all together carry far less noise than independent ones.

    rewards, dones: (T, N);  law: (T + 1, N, K) quantiles at `levels`, the last row after the rollout
    terminal_law:   (K,) at the terminal observation of each truncated (step, env)
    valid:          (T, N); no critic learns the law of an invalid step, so a sum stops at the next valid one instead
    returns:        (T, N, K) samples
    """
    n_steps, n_envs, n_samples = (*rewards.shape, law.shape[-1])
    steps, envs = np.arange(n_steps)[:, None, None], np.arange(n_envs)[:, None]
    ends = episode_ends(dones)
    horizons = draw_horizons(rewards.size, n_samples, lam, n_steps, rng).reshape(n_steps, n_envs, n_samples)
    stop = np.minimum(steps + horizons, ends[..., None])  # (T, N, K), first step that is not summed
    if valid is not None and not valid.all():
        stop = np.minimum(next_valid(valid)[stop, envs], ends[..., None])

    # (R, K): samples of what is ahead of each step, (T + 1) N rows, and of each finished episode's end. The rewards to
    # go from a step are subtracted there: with those to go from a sample's start, what is summed in between remains
    places = np.argwhere(dones)
    laws = [law.reshape(-1, n_samples), terminal_rows(terminal_law, places, n_samples)]
    ahead = resample(np.concatenate(laws), levels, rng).astype(np.float64)
    to_go = rewards_to_go(rewards, dones, gamma)
    ahead[: rewards.size] -= to_go.reshape(-1, 1)

    end_rows = np.tile(rewards.size + np.arange(n_envs), (n_steps + 1, 1))  # an unfinished episode's: after the rollout
    end_rows[places[:, 0] + 1, places[:, 1]] = (n_steps + 1) * n_envs + np.arange(len(places))
    row = np.where(stop < ends[..., None], stop * n_envs + envs, end_rows[ends, envs[:, 0]][..., None])
    targets: Floats = ahead.take(row * n_samples + np.arange(n_samples))
    targets *= (gamma ** np.arange(n_steps + 1)).take(stop - steps)
    targets += to_go[..., None]
    return targets


def terminal_rows(terminal_law: Mapping[tuple[int, int], Floats], places: Ints, n_quantiles: int) -> Floats:
    """(E, Q) the law after each episode end (step, env): of the terminal observation, or zero after a termination."""
    nothing = np.zeros(n_quantiles)
    return np.reshape([terminal_law.get((int(t), int(n)), nothing) for t, n in places], (-1, n_quantiles))


def realised_returns(
    rewards: Floats,
    law: Floats,
    terminal_law: Mapping[tuple[int, int], Floats],
    dones: Bools,
    gamma: float,
    levels: Sequence[float],
) -> Floats:
    """What each step's return came to: all rewards up to the end of its episode or of the rollout, then one sample of
    the law predicted there. No generator is asked: levels are spread evenly over the places where a sample is needed.

    Arguments as of `return_law_samples`;  returns: (T, N)
    """
    n_envs = rewards.shape[1]
    places = np.argwhere(dones)
    laws = np.concatenate([terminal_rows(terminal_law, places, law.shape[-1]), law[-1]])
    spread_out = (0.5 + 0.6180339887 * np.arange(len(laws))) % 1.0  # the golden ratio fills (0, 1) evenly
    at = np.clip(spread_out, 1e-3, 1.0 - 1e-3)
    samples = np.einsum("iq,qi->i", np.sort(laws, -1), interpolation_weights(levels, at))
    ahead = np.zeros_like(rewards)
    ahead[tuple(places.T)] = samples[: len(places)]
    return reverse_scan(rewards + gamma * ahead, np.where(dones, 0.0, gamma), samples[-n_envs:])


def episode_ends(dones: Bools) -> Ints:
    """(T, N) the step after the one that ends the current episode, or T where the rollout ends first."""
    n_steps = len(dones)
    ends = np.where(dones, np.arange(1, n_steps + 1)[:, None], n_steps)
    return np.minimum.accumulate(ends[::-1])[::-1]


def next_valid(valid: Bools) -> Ints:
    """(T + 1, N) the first valid step from each step on, T where none is left."""
    n_steps, n_envs = valid.shape
    steps = np.where(valid, np.arange(n_steps)[:, None], n_steps)
    last = np.full((1, n_envs), n_steps)
    return np.minimum.accumulate(np.concatenate([steps, last])[::-1])[::-1]


def draw_horizons(n: int, n_samples: int, lam: float, longest: int, rng: np.random.Generator) -> Ints:
    """(n, n_samples) horizons k from 1 to `longest`, P(k) = (1 - lam) lam^(k - 1) below it; lam = 1 never stops early.

    A row's horizons are stratified: ceil(log(1 - u) / log(lam)) with one u in each of n_samples equal parts of (0, 1),
    in random order. At most `N_HORIZON_ROWS` rows are drawn, and each of the n is one of them by chance.
    """
    if lam <= 0.0 or lam >= 1.0:
        return np.full((n, n_samples), 1 if lam <= 0.0 else longest)
    n_rows = min(n, N_HORIZON_ROWS)
    strata = rng.permuted(np.broadcast_to(np.arange(n_samples), (n_rows, n_samples)), axis=-1)
    survival = (strata + 1.0 - rng.random((n_rows, n_samples))) / n_samples  # 1 - u, in (0, 1]
    horizons: Ints = np.clip(np.ceil(np.log(survival) / np.log(lam)), 1, longest).astype(np.int64)
    return horizons if n == n_rows else horizons[rng.integers(n_rows, size=n)]


def rewards_to_go(rewards: Floats, dones: Bools, gamma: float) -> Floats:
    """(T, N) discounted rewards from each step to the end of its episode or of the rollout."""
    return reverse_scan(rewards, np.where(dones, 0.0, gamma), np.zeros(rewards.shape[1]))


def resample(quantiles: Floats, levels: Sequence[float], rng: np.random.Generator) -> Floats:
    """Samples of the laws at one random level per cell: unlike the quantiles themselves they keep the tails' spread."""
    n = len(levels)
    if n == 1:
        return quantiles
    at = (np.arange(n) + rng.uniform(1e-3, 1.0 - 1e-3, n)) / n  # off the ends, where the level would be 0 or 1
    return quantiles @ interpolation_weights(levels, at).astype(quantiles.dtype)
