"""The set of perturbations: how far each feature may be moved, in unit coordinates that the search works in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from tailguard.errors import ConfigError
from tailguard.normalization import ObservationStatistics

Norm = Literal["linf", "l2"]
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Ball:
    """Perturbations d = sizes * u with |u| <= 1 per observation, cut where the observation would leave its bounds."""

    sizes: Tensor  # (F,) how far each feature may be moved; 0 where it cannot be attacked
    norm: Norm = "linf"
    low: Tensor | None = None  # (F,) bounds of the observation; None where there are none
    high: Tensor | None = None

    def within(self, bounds: tuple[Tensor, Tensor] | None) -> Ball:
        """The same ball under other bounds."""
        low, high = bounds if bounds is not None else (None, None)
        return replace(self, low=low, high=high)

    def moved(self, observations: Tensor, unit: Tensor) -> Tensor:
        """Observations (..., F) after the perturbation `unit` (..., F)."""
        moved = observations + self.sizes * unit
        if self.low is None or self.high is None:
            return moved
        # an observation that is out of bounds already is never pulled further than the ball allows
        highest, lowest = torch.maximum(self.high, observations), torch.minimum(self.low, observations)
        return torch.minimum(torch.maximum(moved, lowest), highest)

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Points (*shape) drawn evenly from the unit ball over the features that can be attacked."""
        open_ = (self.sizes > 0.0).to(self.sizes.dtype)
        if self.norm == "linf":
            return (2.0 * torch.rand(tuple(shape), generator=generator).to(self.sizes) - 1.0) * open_
        direction = torch.randn(tuple(shape), generator=generator).to(self.sizes) * open_
        radius = torch.rand((*shape[:-1], 1), generator=generator).to(self.sizes)
        return direction / length_of(direction) * radius ** (1.0 / max(int(open_.sum()), 1))

    def ascended(self, unit: Tensor, gradient: Tensor, step: float) -> Tensor:
        """One step of steepest ascent in this norm, projected back into the ball."""
        if self.norm == "linf":
            return (unit + step * gradient.sign()).clamp(-1.0, 1.0)
        risen = unit + step * gradient / length_of(gradient)
        return risen / length_of(risen).clamp(min=1.0)


def length_of(vectors: Tensor) -> Tensor:
    """(..., 1) Euclidean length, never zero."""
    lengths: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return lengths.clamp(min=1e-12)


def feature_sizes(
    n_features: int, scales: Sequence[float] | None, spare: Sequence[int], attackable: Floats | None
) -> Floats:
    """(F,) factor on epsilon per feature: what the settings say, otherwise what the environment declares."""
    if scales is not None and len(scales) != n_features:
        raise ConfigError(
            f"adversary: {len(scales)} scales for observations of {n_features} features. Give one number per feature."
        )
    beyond = [column for column in spare if column >= n_features]
    if beyond:
        raise ConfigError(
            f"adversary: there is no column {beyond[0]} to spare; observations have columns 0 to {n_features - 1}."
        )
    declared = np.ones(n_features) if attackable is None else np.asarray(attackable, np.float64).reshape(-1)
    sizes = np.array(scales if scales is not None else declared, np.float64)
    sizes[list(spare)] = 0.0
    return sizes


def attackable_features(env: VecEnv) -> Floats | None:
    """(F,) what an environment says under the name `attackable`; None when it says nothing."""
    return np.asarray(env.get_attr("attackable", 0)[0], np.float64) if env.has_attr("attackable") else None


def observation_bounds(
    space: spaces.Space[Any], statistics: ObservationStatistics
) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
    """(F,) lowest and highest observation that the policy can see; None where nothing is bounded."""
    if not isinstance(space, spaces.Box):
        return None
    low, high = (np.asarray(end, np.float64) for end in (space.low, space.high))
    low, high = (np.asarray(statistics.normalize(end[None])[0]).reshape(-1) for end in (low, high))
    if not (np.isfinite(low).any() or np.isfinite(high).any()):
        return None
    return low.astype(np.float32), high.astype(np.float32)
