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
    """For each step one horizon k ~ Geometric(1 - lam), cut at episode or rollout end (docs/algorithm.md, eq. 6):

        target = sum of k discounted rewards + gamma^k * samples of the law predicted there

    Averaging over k, as a lambda-return does, would shrink the spread; drawing it keeps the law.

    rewards, dones: (T, N);  law: (T + 1, N, Q) quantiles at `levels`, the last row after the rollout
    terminal_law:   (Q,) at the terminal observation of each truncated (step, env)
    valid:          (T, N); no critic learns the law of an invalid step, so a sum stops at the next valid one instead
    returns:        (T, N, Q) samples at stratified random levels
    """
    n_steps, n_envs = rewards.shape
    ends = episode_ends(dones)
    horizon = draw_horizons(rewards.shape, lam, rng)
    stop = np.minimum(np.arange(n_steps)[:, None] + horizon, ends)  # (T, N), first step that is not summed
    env = np.broadcast_to(np.arange(n_envs), rewards.shape)
    if valid is not None and not valid.all():
        stop = np.minimum(next_valid(valid)[stop, env], ends)
    ended = dones[stop - 1, env]  # the sum ran into an episode's end
    discount = gamma ** (stop - np.arange(n_steps)[:, None])
    to_go = np.concatenate([rewards_to_go(rewards, dones, gamma), np.zeros((1, n_envs))])
    summed = to_go[:-1] - np.where(ended, 0.0, discount * to_go[stop, env])

    ahead = law[stop, env]
    ahead[ended] = 0.0
    if terminal_law:
        steps, envs = (np.array(index) for index in zip(*terminal_law, strict=True))
        rows = np.full(rewards.shape, -1)
        rows[steps, envs] = np.arange(len(terminal_law))
        row = np.where(ended, rows[stop - 1, env], -1)
        ahead[row >= 0] = np.stack(list(terminal_law.values()))[row[row >= 0]]
    targets: Floats = discount[..., None] * resample(ahead, levels, rng)
    targets += summed[..., None]
    return targets


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
    ends = [terminal_law.get((int(t), int(n)), np.zeros(law.shape[-1])) for t, n in places]
    laws = np.concatenate([np.reshape(ends, (-1, law.shape[-1])), law[-1]])
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


def draw_horizons(shape: tuple[int, ...], lam: float, rng: np.random.Generator) -> Ints:
    """k >= 1 with P(k) = (1 - lam) lam^(k - 1); lam = 1 never stops early."""
    return np.full(shape, 2**31) if lam >= 1.0 else rng.geometric(1.0 - lam, shape)


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
