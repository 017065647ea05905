"""Policies and sequences to attack, with answers that are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from tailguard.adversary import Ball, Scene
from tailguard.policy import Layout, PolicyConfig, RecurrentPolicy

L, B, F = 6, 5, 4


def policy_of(n_features: int, action: spaces.Space[Any] | None = None, **config: Any) -> RecurrentPolicy:
    """A policy whose weights are large enough to be attacked."""
    torch.manual_seed(0)
    space = spaces.Box(-np.inf, np.inf, (n_features,), np.float32)
    policy = RecurrentPolicy(space, action or spaces.Box(-1.0, 1.0, (3,), np.float32), PolicyConfig(**config))
    for weight in policy.action_head.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight)
    return policy


def linear_policy(n_features: int = 11) -> RecurrentPolicy:
    """A Gaussian whose mean is a matrix times the observation."""
    return policy_of(n_features, memory="none", net_arch=[])


def recurrent_policy() -> RecurrentPolicy:
    return policy_of(F, lstm_hidden_size=8, net_arch=[8])


def scene_of(policy: RecurrentPolicy, length: int = L, n: int = B, seed: int = 0) -> Scene:
    """Sequences with episode starts inside and a padded end."""
    rng = np.random.default_rng(seed)
    starts = rng.random((length, n)) < 0.2
    valid = torch.ones(length, n, dtype=torch.bool)
    valid[-1, 0] = length == 1
    observations = torch.from_numpy(rng.normal(size=(length, n, policy.obs_features)).astype(np.float32))
    return Scene(observations, Layout(starts), policy.initial_state(n), valid)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cube(n_features: int, epsilon: float, **options: Any) -> Ball:
    return Ball(torch.full((n_features,), epsilon), **options)
