"""One rollout: T steps of N environments, everything in raw reward units."""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tailguard.errors import NonFiniteError
from tailguard.policy import State

Floats = NDArray[np.floating[Any]]


class RolloutBuffer:
    """What acting wrote down (T, N, ...), what the critics said of it, and what follows for the update.

    The recurrent state is kept before the first step of every sequence; the states inside follow from it.
    """

    def __init__(self, n_steps: int, n_envs: int, obs_features: int, action_dim: int, sequence_length: int) -> None:
        self.n_steps, self.n_envs, self.sequence_length = n_steps, n_envs, sequence_length
        shape = (n_steps, n_envs)
        self.observations = np.zeros((*shape, obs_features), np.float32)
        self.actions = np.zeros((*shape, action_dim), np.float32)
        self.modes = np.zeros((*shape, action_dim), np.float32)  # what the action would have been without noise
        self.log_probs = np.zeros(shape, np.float32)
        self.rewards = np.zeros(shape, np.float64)
        self.starts = np.zeros(shape, np.bool_)  # the step begins an episode
        self.terminated = np.zeros(shape, np.bool_)
        self.truncated = np.zeros(shape, np.bool_)
        self.valid = np.ones(shape, np.bool_)  # samples that count in the update
        self.reset()

    def reset(self) -> None:
        """Forget the last rollout."""
        self.position = 0
        self.valid[:], self.terminated[:], self.truncated[:] = True, False, False
        self.actor_states: list[State] = []  # before each sequence's first step
        self.critic_states: list[list[State]] = []  # [sequence][critic]
        self.terminal_observations: dict[tuple[int, int], Floats] = {}  # of truncated episodes, by (step, env)
        self.last_observations: Floats = np.zeros((0,), np.float32)
        self.quantiles: Floats = np.zeros((0,), np.float32)  # (C, T, N, Q) per critic
        self.law: Floats = np.zeros((0,), np.float32)  # (T + 1, N, Q) aggregated, the last row after the rollout
        self.terminal_law: dict[tuple[int, int], Floats] = {}  # aggregated (Q,), by (step, env)
        self.values: Floats = np.zeros((0,), np.float64)  # (T + 1, N)
        self.terminal_values: Floats = np.zeros((0,), np.float64)  # (T, N), zero where not truncated
        self.features = torch.zeros(0)  # (T + 1, N, H) of the first critic, where a risk value reads them
        self.terminal_features = torch.zeros(0)  # (E, H) in the order of np.nonzero(truncated)
        self.advantages: Floats = np.zeros((0,), np.float64)
        self.returns: Floats = np.zeros((0,), np.float64)
        self.risk_advantages: Floats = np.zeros((0,), np.float64)  # of the risk stream, undiscounted
        self.risk_returns: Floats = np.zeros((0,), np.float64)
        self.period: Floats = np.zeros((0,), np.float64)  # (T, N, 2) where the risk period stands before each step

    @property
    def full(self) -> bool:
        return self.position == self.n_steps

    @property
    def dones(self) -> NDArray[np.bool_]:
        """(T, N) the step ended an episode, of either kind."""
        return self.terminated | self.truncated

    def add(self, obs: Floats, action: Floats, start: NDArray[np.bool_], reward: Floats) -> int:
        """Write one step of all environments; returns its number."""
        t = self.position
        self.observations[t], self.actions[t] = obs, action
        self.starts[t], self.rewards[t] = start, reward
        self.position = t + 1
        return t


def require_finite(name: str, values: Floats, what_to_do: str, first_step: int = 0) -> None:
    """Raise naming the quantity, the step and the environment of the first number in (T, N) that is not finite."""
    if all_finite(values):
        return
    t, n = (int(i) for i in np.argwhere(~np.isfinite(values))[0])
    raise NonFiniteError(
        f"{name} is {values[t, n]} at step {first_step + t} of the rollout in environment {n}. {what_to_do}"
    )


def all_finite(values: NDArray[Any]) -> bool:
    """Acting asks at every step, and a sum of squares is quick to make: only one that is not finite is looked into."""
    if isfinite(np.vdot(values, values)):
        return True
    return int(np.count_nonzero(np.isfinite(values))) == values.size
