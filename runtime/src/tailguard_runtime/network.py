"""The network of a policy as functions of arrays, one step at a time, N environments at once.

Weights, states and results are float32, what lies between them float64: a cell adds up roundings over thousands of
steps, and those of the agent are enough.
"""

from __future__ import annotations

from collections.abc import Callable
from math import erf, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Wide = NDArray[np.float64]


class State(NamedTuple):
    """Recurrent state: (layers, N, H) each; the cell of a GRU is empty, and so are both without a recurrent layer."""

    hidden: Array
    cell: Array

    def keep(self, episode_start: NDArray[np.bool_]) -> State:
        """The state with zeros where `episode_start` (N,) is True."""
        keep = (~episode_start).astype(np.float32)[None, :, None]
        return State(self.hidden * keep, self.cell * keep)


class Gates(NamedTuple):
    """The weights of one recurrent layer, transposed: (F, gates * H), (H, gates * H), (gates * H,)."""

    input_weight: Wide
    hidden_weight: Wide
    bias: Wide


def sigmoid(x: Wide) -> Wide:
    """1 / (1 + exp(-x)), without overflow."""
    opened: Wide = 0.5 * np.tanh(0.5 * x) + 0.5
    return opened


def lstm_step(x: Wide, hidden: Array, cell: Array, gates: Gates) -> tuple[Wide, Wide]:
    """Hidden and cell (N, H) after inputs x (N, F); gates in the order input, forget, candidate, output."""
    n_units = hidden.shape[1]
    z = x @ gates.input_weight + hidden @ gates.hidden_weight + gates.bias
    opened = sigmoid(z)
    after = opened[:, n_units : 2 * n_units] * cell + opened[:, :n_units] * np.tanh(z[:, 2 * n_units : 3 * n_units])
    return opened[:, 3 * n_units :] * np.tanh(after), after


def gru_step(x: Wide, hidden: Array, gates: Gates) -> Wide:
    """Hidden (N, H) after inputs x (N, F); gates in the order reset, update, candidate."""
    n_units = hidden.shape[1]
    from_input, from_hidden = x @ gates.input_weight + gates.bias, hidden @ gates.hidden_weight
    opened = sigmoid(from_input[:, : 2 * n_units] + from_hidden[:, : 2 * n_units])
    candidate = np.tanh(from_input[:, 2 * n_units :] + opened[:, :n_units] * from_hidden[:, 2 * n_units :])
    after: Wide = candidate + opened[:, n_units:] * (hidden - candidate)
    return after


def gelu(x: Wide) -> Wide:
    """x times the normal distribution's probability of a value below x."""
    below = np.fromiter((erf(value) for value in (x / sqrt(2.0)).ravel()), np.float64, x.size).reshape(x.shape)
    return x * (0.5 + 0.5 * below)


ACTIVATIONS: dict[str, Callable[[Wide], Any]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0.0),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0.0))),
    "gelu": gelu,
    "silu": lambda x: x * sigmoid(x),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
}


class Network(NamedTuple):
    """Recurrent layers, then layers with an activation, then the last layer."""

    rnn: str
    gates: tuple[Gates, ...]
    layers: tuple[tuple[Wide, Wide], ...]  # transposed weights (n_in, n_out) and biases (n_out,)
    activation: str
    head: tuple[Wide, Wide]

    def step(self, x: Array, state: State) -> tuple[Array, State]:
        """The last layer's output (N, P) for observations (N, F), and the state after them."""
        wide = x.astype(np.float64)
        if self.gates:
            hidden, cell = np.empty_like(state.hidden), np.empty_like(state.cell)
            for i, gates in enumerate(self.gates):
                if self.rnn == "lstm":
                    wide, cell[i] = lstm_step(wide, state.hidden[i], state.cell[i], gates)
                else:
                    wide = gru_step(wide, state.hidden[i], gates)
                hidden[i] = wide
            state = State(hidden, cell)
        activation = ACTIVATIONS[self.activation]
        for weight, bias in self.layers:
            wide = activation(wide @ weight + bias)
        return (wide @ self.head[0] + self.head[1]).astype(np.float32), state
