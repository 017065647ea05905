"""Observations as vectors, and which of their columns the critics see."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from tailguard.errors import ConfigError, EnvContractError


class ObservationMask(nn.Module):
    """Some columns of an observation (..., F) read as zero."""

    def __init__(self, n_features: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        seen = torch.ones(n_features)
        seen[list(hidden)] = 0.0
        self.register_buffer("seen", seen, persistent=False)
        self.seen: Tensor

    def forward(self, obs: Tensor) -> Tensor:
        return obs * self.seen


def make_observation_mask(n_features: int, hidden: tuple[int, ...]) -> nn.Module:
    """The mask of `hidden_from_critics`; without hidden columns observations (..., F) pass as they are."""
    if any(column >= n_features for column in hidden):
        raise ConfigError(f"hidden_from_critics={hidden}: the observation has columns 0 to {n_features - 1} only.")
    return ObservationMask(n_features, hidden) if hidden else nn.Identity()


def flat_features(space: spaces.Space[Any]) -> int:
    """Number of features of a Box observation, or a clear refusal."""
    if not isinstance(space, spaces.Box):
        raise EnvContractError(
            f"The observation space {space} is not supported: observations must be a Box. Wrap the environment, for "
            "example with gymnasium.wrappers.FlattenObservation."
        )
    if int(np.prod(space.shape)) == 0:
        raise EnvContractError(f"The observation space {space} has no features.")
    return int(np.prod(space.shape))
