"""The body of the actor or of one critic: a memory, then layers."""

from __future__ import annotations

from torch import Tensor, nn

from tailguard.policy.config import ACTIVATIONS, PolicyConfig
from tailguard.policy.recurrent import Layout, State, Unrolled, make_memory


class Trunk(nn.Module):
    """Memory, then layers: the body of the actor or of one critic."""

    def __init__(self, in_features: int, widths: tuple[int, ...], config: PolicyConfig) -> None:
        super().__init__()
        size, n_layers = config.lstm_hidden_size, config.n_lstm_layers
        self.memory = make_memory(config.memory, in_features, size, n_layers, config.recurrent_init)
        layers: list[nn.Module] = []
        width = self.memory.out_features
        for next_width in widths:
            linear = nn.Linear(width, next_width)
            if config.ortho_init:
                nn.init.orthogonal_(linear.weight, 2**0.5)
                nn.init.zeros_(linear.bias)
            layers += [linear, ACTIVATIONS[config.activation_fn]()]
            width = next_width
        self.layers = nn.Sequential(*layers)
        self.out_features = width

    def forward(
        self, x: Tensor, state: State, layout: Layout | None = None, extra: Tensor | None = None
    ) -> tuple[Tensor, State] | Unrolled:
        """Features (N, H) of single observations (N, F) and the state after; with a layout, of whole sequences."""
        if layout is None:
            features, state = self.memory(x, state)
            return self.layers(features), state
        unrolled = self.memory(x, state, layout, extra)
        aside = unrolled.extra_features if extra is None else self.layers(unrolled.extra_features)
        return Unrolled(self.layers(unrolled.features), aside, unrolled.state)
