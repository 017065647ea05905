"""The value of the risk stream: one number per step, on top of what a critic already sees."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tailguard.normalization import Affine
from tailguard.policy.known import is_chain, is_plain

PERIOD_FEATURES = 2
"""How far X stands from the threshold, and the share of the period that is over."""


class RiskValue(nn.Module):
    """Expected rest of the risk stream, in the normalized units of its own scale.

    It reads the first critic's features without sending gradient back (the quantiles belong to the money), the
    observation, and where the period stands: a baseline may know X even where the policy does not.
    """

    def __init__(self, critic_features: int, obs_features: int, mask: nn.Module, units: int) -> None:
        super().__init__()
        self.mask = mask
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
        return torch.cat([critic_features.detach(), self.mask(obs), period], -1)

    @property
    def linear(self) -> list[nn.Linear]:
        return [*(layer for layer in self.layers if isinstance(layer, nn.Linear)), self.output]

    def is_known(self) -> bool:
        """Whether it is exactly what the native core computes; otherwise torch does the work."""
        n_in = self.layers[0].in_features if isinstance(self.layers[0], nn.Linear) else 0
        return is_plain(self, RiskValue) and is_chain(self.layers, nn.Tanh, n_in, self.output)

    @torch.no_grad()
    def rescale(self, before: Affine, after: Affine) -> tuple[nn.Linear, float, float]:
        """PopArt: decoded values stay; gives the last layer and the factors on its weights and its gradients."""
        factor = before.std / after.std
        self.output.weight.mul_(factor)
        self.output.bias.mul_(factor).add_((before.mean - after.mean) / after.std)
        return self.output, factor, factor  # the slope of a squared error is an error, which changes its unit
