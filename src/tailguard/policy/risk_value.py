"""The value of the risk stream: one number per step, on top of what a critic already sees."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from tailguard.loops import compiled
from tailguard.normalization import Affine
from tailguard.policy.packing import packed_weights
from tailguard.policy.products import Array
from tailguard.policy.trunk_kernel import dense_forward, out_of
from tailguard.policy.trunk_layout import Shape, aligned_zeros, in_one, known_to_loops, layers_of

PERIOD_FEATURES = 2
"""How far X stands from the threshold, and the share of the period that is over."""

MOST_ROWS = 512
"""That go through the compiled loops at a time, so that their room stays in the cache."""


class RiskValue(nn.Module):
    """Expected rest of the risk stream, in the normalized units of its own scale.

    It reads the first critic's features without sending gradient back (the quantiles belong to the money), the
    observation, and where the period stands: a baseline may know X even where the policy does not.
    """

    def __init__(self, critic_features: int, obs_features: int, sight: nn.Module, units: int) -> None:
        super().__init__()
        self.sight = sight
        inputs = critic_features + obs_features + PERIOD_FEATURES
        self.layers = nn.Sequential(nn.Linear(inputs, units), nn.Tanh(), nn.Linear(units, units), nn.Tanh())
        self.output = nn.Linear(units, 1)
        for layer in (self.layers[0], self.layers[2]):
            nn.init.orthogonal_(layer.weight, 2**0.5)  # type: ignore[arg-type]
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        nn.init.orthogonal_(self.output.weight, 0.1)
        nn.init.zeros_(self.output.bias)

    def forward(self, critic_features: Tensor, obs: Tensor, period: Tensor) -> Tensor:
        """(...) from features (..., H), observations (..., F) and period features (..., 2)."""
        return self.output(self.layers(self.inputs(critic_features, obs, period))).squeeze(-1)  # type: ignore[no-any-return]

    def inputs(self, critic_features: Tensor, obs: Tensor, period: Tensor) -> Tensor:
        return torch.cat([critic_features.detach(), self.sight(obs), period], -1)

    @property
    def linear(self) -> list[nn.Linear]:
        return [*(layer for layer in self.layers if isinstance(layer, nn.Linear)), self.output]

    @torch.no_grad()
    def read(self, critic_features: Tensor, obs: Tensor, period: Tensor) -> Array:
        """The same without gradient, in compiled loops where these know the weights."""
        if not known_to_loops(self.output.weight):
            return self(critic_features, obs, period).numpy(force=True)  # type: ignore[no-any-return]
        x = self.inputs(critic_features, obs, period)
        flat, begins = in_one([part for layer in self.linear for part in (layer.weight, layer.bias)])
        return read_rows(layers_of(self.linear, begins), flat, x.reshape(-1, x.shape[-1]).numpy()).reshape(x.shape[:-1])

    @torch.no_grad()
    def rescale(self, before: Affine, after: Affine) -> tuple[nn.Linear, float, float]:
        """PopArt: decoded values stay; gives the last layer and the factors on its weights and its gradients."""
        factor = before.std / after.std
        self.output.weight.mul_(factor)
        self.output.bias.mul_(factor).add_((before.mean - after.mean) / after.std)
        return self.output, factor, factor  # the slope of a squared error is an error, which changes its unit


def read_rows(shape: Shape, flat: Array, x: Array) -> Array:
    """(rows,) what linear layers with one output say of x (rows, I)."""
    outs, values = aligned_zeros(MOST_ROWS * int(shape.dense[:, 2].sum())), np.empty(len(x), np.float32)
    read_kernel(shape, flat, packed_weights(shape, flat), x, outs, values)
    return values


@compiled
def read_kernel(shape, flat, packed, x, outs, values):  # type: ignore[no-untyped-def]
    for first in range(0, len(x), MOST_ROWS):
        some = x[first : first + MOST_ROWS]
        dense_forward(shape, flat, packed, some, outs)
        values[first : first + MOST_ROWS] = out_of(shape, outs, len(some), len(shape.dense) - 1)[:, 0]
