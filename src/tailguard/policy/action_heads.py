"""From features to actions: one head per action space, as plain functions of the head's parameters.

A head's parameters are one tensor (..., P); actions live in the buffer as float (..., A) in the head's own units, and
`to_env` turns them into what the environment takes.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tailguard.errors import ConfigError, EnvContractError

LOG_2PI = float(np.log(2.0 * np.pi))
ONE = np.float32(1.0)
Bounds = Literal["clip", "squash"]


class ActionHead(nn.Module):
    """What the policy needs to know of an action space."""

    action_dim: int
    largest_entropy: float | None = None
    """Of the uniform policy; None where there is none."""

    @property
    def last_layer(self) -> nn.Linear:
        """What reads the features."""
        raise NotImplementedError

    def distribution(self, output: Tensor) -> Tensor:
        """Parameters (..., P) of the action distribution from the last layer's output."""
        raise NotImplementedError

    def forward(self, features: Tensor) -> Tensor:
        """Parameters (..., P) of the action distribution."""
        return self.distribution(self.last_layer(features))

    def noise(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        """The randomness (*shape, A) that sampling actions for `shape` observations takes: uniform draws, or normal."""
        return torch.rand((*shape, self.action_dim), generator=generator)

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        """One action (..., A)."""
        raise NotImplementedError

    def sample_array(self, output: NDArray[np.float32], noise: NDArray[np.float32]) -> NDArray[np.float32]:
        """`sample` straight from the last layer's output, as arrays (n, W) and (n, A): what acting calls every step."""
        return self.sample(self.distribution(torch.from_numpy(output)), torch.from_numpy(noise)).numpy()

    def mode(self, parameters: Tensor) -> Tensor:
        """The most likely action (..., A)."""
        raise NotImplementedError

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        """Log-density or log-probability (...) of an action, exact."""
        raise NotImplementedError

    def entropy(self, parameters: Tensor) -> Tensor:
        """Entropy (...)."""
        raise NotImplementedError

    def divergence(self, from_: Tensor, to: Tensor, detach_spread: bool = False) -> Tensor:
        """KL(from || to) (...) of two action distributions, exact; no gradient reaches a spread that is detached."""
        raise NotImplementedError

    def to_env(self, action: NDArray[np.float32]) -> NDArray[Any]:
        """What the environment takes, (N, ...), for actions (N, A)."""
        raise NotImplementedError


class GaussianHead(ActionHead):
    """Gaussian of state-independent spread on an axis where the bounds are -1 and 1.

    `clip`: samples beyond the bounds are clipped on their way to the environment only; the density is the Gaussian's.
    `squash`: the action is tanh of the Gaussian; density and entropy include the change of variable (eq. 13).
    The buffer holds the Gaussian's own sample, so no inverse of tanh is ever taken.
    """

    def __init__(self, in_features: int, space: spaces.Box, bounds: Bounds, log_std_init: float) -> None:
        super().__init__()
        self.action_dim = int(np.prod(space.shape))
        self.space, self.bounds = space, bounds
        self.mean = nn.Linear(in_features, self.action_dim)
        self.log_std = nn.Parameter(torch.full((self.action_dim,), float(log_std_init)))
        nodes, weights = np.polynomial.hermite_e.hermegauss(8)
        self.register_buffer("nodes", torch.tensor(nodes, dtype=torch.float32), persistent=False)
        self.register_buffer(
            "node_weights", torch.tensor(weights / weights.sum(), dtype=torch.float32), persistent=False
        )
        self.nodes: Tensor
        self.node_weights: Tensor
        low, high = space.low.reshape(-1).astype(np.float64), space.high.reshape(-1).astype(np.float64)
        self.centre, self.half_width = (high + low) / 2, (high - low) / 2
        self.unit_box = bool((low == -1.0).all() and (high == 1.0).all() and space.dtype == np.float32)

    @property
    def last_layer(self) -> nn.Linear:
        return self.mean

    def distribution(self, output: Tensor) -> Tensor:
        return torch.cat([output, self.log_std.expand_as(output)], -1)

    def noise(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        return torch.randn((*shape, self.action_dim), generator=generator)

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        mean, log_std = parameters.chunk(2, -1)
        return mean + log_std.exp() * noise

    def sample_array(self, output: NDArray[np.float32], noise: NDArray[np.float32]) -> NDArray[np.float32]:
        action: NDArray[np.float32] = output + np.exp(self.log_std.detach().numpy()) * noise
        return action

    def mode(self, parameters: Tensor) -> Tensor:
        return parameters.chunk(2, -1)[0]

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        mean, log_std = parameters.chunk(2, -1)
        density = -0.5 * ((action - mean) * (-log_std).exp()).square() - log_std - 0.5 * LOG_2PI
        if self.bounds == "squash":
            density = density - log_tanh_slope(action)
        return density.sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        mean, log_std = parameters.chunk(2, -1)
        entropy = log_std + 0.5 * (1.0 + LOG_2PI)
        if self.bounds == "squash":
            at_nodes = log_tanh_slope(mean.unsqueeze(-1) + log_std.exp().unsqueeze(-1) * self.nodes)
            entropy = entropy + at_nodes @ self.node_weights  # quadrature of the change of variable
        return entropy.sum(-1)

    def divergence(self, from_: Tensor, to: Tensor, detach_spread: bool = False) -> Tensor:
        """Of the Gaussians: squashing both by the same function changes nothing."""
        (mean, log_std), (other, other_log_std) = from_.chunk(2, -1), to.chunk(2, -1)
        if detach_spread:
            log_std, other_log_std = log_std.detach(), other_log_std.detach()
        gap = log_std - other_log_std
        apart = 0.5 * ((mean - other) * (-other_log_std).exp()).square()
        return (0.5 * ((2.0 * gap).exp() - 1.0) - gap + apart).sum(-1)

    def to_env(self, action: NDArray[np.float32]) -> NDArray[Any]:
        if self.unit_box and self.bounds == "clip":
            clipped: NDArray[np.float32] = np.minimum(np.maximum(action, -ONE), ONE)
            return clipped.reshape(-1, *self.space.shape)
        wide = action.astype(np.float64)
        unit = np.tanh(wide) if self.bounds == "squash" else wide.clip(-1.0, 1.0)
        raw: NDArray[np.float64] = self.centre + self.half_width * unit
        return raw.reshape(-1, *self.space.shape).astype(self.space.dtype).clip(self.space.low, self.space.high)


def log_tanh_slope(x: Tensor) -> Tensor:
    """log(1 - tanh(x)^2), accurate for large |x|."""
    return 2.0 * (float(np.log(2.0)) - x - functional.softplus(-2.0 * x))


class CategoricalHead(ActionHead):
    """Independent choices, one per dimension of a Discrete or MultiDiscrete space."""

    def __init__(self, in_features: int, space: spaces.Discrete | spaces.MultiDiscrete) -> None:
        super().__init__()
        self.space = space
        counts = [int(space.n)] if isinstance(space, spaces.Discrete) else [int(n) for n in space.nvec.reshape(-1)]
        self.action_dim, self.width = len(counts), max(counts)
        self.largest_entropy = float(np.log(counts).sum()) or None  # a single choice has none
        self.logits = nn.Linear(in_features, self.action_dim * self.width)
        forbidden = torch.arange(self.width) >= torch.tensor(counts).unsqueeze(-1)
        self.register_buffer("forbidden", forbidden, persistent=False)
        self.forbidden: Tensor
        self.ragged = min(counts) < self.width

    @property
    def last_layer(self) -> nn.Linear:
        return self.logits

    def distribution(self, output: Tensor) -> Tensor:
        """Log-probabilities, flattened (..., A * width); choices a dimension does not have are at -1e9."""
        logits = self.by_choice(output)
        if self.ragged:
            logits = logits.masked_fill(self.forbidden, -1e9)
        return logits.log_softmax(-1).flatten(-2)

    def by_choice(self, parameters: Tensor) -> Tensor:
        """(..., A, width)"""
        return parameters.reshape(*parameters.shape[:-1], self.action_dim, self.width)

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        cumulative = self.by_choice(parameters).exp().cumsum(-1)
        return (noise.unsqueeze(-1) * cumulative[..., -1:] >= cumulative[..., :-1]).sum(-1).to(parameters.dtype)

    def sample_array(self, output: NDArray[np.float32], noise: NDArray[np.float32]) -> NDArray[np.float32]:
        if self.ragged:
            return super().sample_array(output, noise)
        logits = output.reshape(len(output), self.action_dim, self.width)
        cumulative = np.exp(logits - logits.max(-1, keepdims=True)).cumsum(-1)
        passed = noise[..., None] * cumulative[..., -1:] >= cumulative[..., :-1]
        chosen: NDArray[np.float32] = passed.sum(-1).astype(np.float32)
        return chosen

    def mode(self, parameters: Tensor) -> Tensor:
        return self.by_choice(parameters).argmax(-1).to(parameters.dtype)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        return self.by_choice(parameters).gather(-1, action.long().unsqueeze(-1)).squeeze(-1).sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        logs = self.by_choice(parameters)
        return -(logs.exp() * logs).sum((-1, -2))

    def divergence(self, from_: Tensor, to: Tensor, detach_spread: bool = False) -> Tensor:
        return (from_.exp() * (from_ - to)).sum(-1)

    def to_env(self, action: NDArray[np.float32]) -> NDArray[Any]:
        chosen = action.astype(np.int64)
        if isinstance(self.space, spaces.Discrete):
            return chosen.reshape(-1) + int(self.space.start)
        return chosen.reshape(-1, *self.space.shape) + self.space.start


class BernoulliHead(ActionHead):
    """Independent switches of a MultiBinary space."""

    def __init__(self, in_features: int, space: spaces.MultiBinary) -> None:
        super().__init__()
        self.space = space
        self.action_dim = int(np.prod(space.shape))
        self.largest_entropy = self.action_dim * float(np.log(2.0))
        self.logits = nn.Linear(in_features, self.action_dim)

    @property
    def last_layer(self) -> nn.Linear:
        return self.logits

    def distribution(self, output: Tensor) -> Tensor:
        return output

    def sample(self, parameters: Tensor, noise: Tensor) -> Tensor:
        return (noise < parameters.sigmoid()).to(parameters.dtype)

    def mode(self, parameters: Tensor) -> Tensor:
        return (parameters > 0).to(parameters.dtype)

    def log_prob(self, parameters: Tensor, action: Tensor) -> Tensor:
        return -functional.binary_cross_entropy_with_logits(parameters, action, reduction="none").sum(-1)

    def entropy(self, parameters: Tensor) -> Tensor:
        return (functional.softplus(parameters) - parameters * parameters.sigmoid()).sum(-1)

    def divergence(self, from_: Tensor, to: Tensor, detach_spread: bool = False) -> Tensor:
        on = from_.sigmoid() * (from_ - to)
        return (on + functional.softplus(to) - functional.softplus(from_)).sum(-1)

    def to_env(self, action: NDArray[np.float32]) -> NDArray[Any]:
        return action.astype(np.int8).reshape(-1, *self.space.shape)


HEADS: tuple[type[ActionHead], ...] = (GaussianHead, CategoricalHead, BernoulliHead)


def make_action_head(in_features: int, space: spaces.Space[Any], bounds: Bounds, log_std_init: float) -> ActionHead:
    """The head for an action space, or a clear refusal."""
    if isinstance(space, spaces.Box):
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise EnvContractError(
                f"The action space {space} has an infinite bound, so no action can be scaled to it. "
                "Give the Box finite low and high."
            )
        if bounds not in ("clip", "squash"):
            raise ConfigError(f'action_bounds={bounds!r} is unknown. Use "clip" or "squash".')
        return GaussianHead(in_features, space, bounds, log_std_init)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        return CategoricalHead(in_features, space)
    if isinstance(space, spaces.MultiBinary):
        return BernoulliHead(in_features, space)
    raise EnvContractError(
        f"The action space {space} is not supported. Supported: Box, Discrete, MultiDiscrete, MultiBinary."
    )
