"""Memory: recurrent layers that run over whole sequences in one call, episode starts included.

Torch's fused calls know nothing of episodes. So that sequences need not be cut where one starts, control rows are
inserted between the steps, and two extra input channels drive the gates of those rows into saturation: a *reset* row
leaves exactly zero state behind, a *hold* row (padding) carries the cell on unchanged (docs/algorithm.md, eq. 2-3).
The native core runs the same LSTM without such rows (kernels/, policy/native.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tailguard.policy.known import is_plain

Bools = NDArray[np.bool_]

RecurrentInit = Literal["orthogonal", "uniform", "mixed"]
"""How the weights of a memory start."""
REMEMBER_EVERY = 2
"""In a `mixed` start: of so many units one remembers; the others start as torch's."""
TIME_SCALES = (2.0, 100.0)
"""Steps after which the shortest and the longest of them have forgotten."""
SATURATE = 1e4  # sigmoid(+-1e4) is exactly 1 or 0 in float32, whatever the rest of the gate's input says


class State(NamedTuple):
    """Recurrent state before a step: (layers, N, H) each; the cell of a GRU is empty, a memoryless state both."""

    hidden: Tensor
    cell: Tensor

    def detach_numpy(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return self.hidden.numpy(force=True), self.cell.numpy(force=True)

    def copy(self) -> State:
        """A copy in contiguous memory, which may be stepped in place."""
        return State(*(part.clone(memory_format=torch.contiguous_format) for part in self))

    def select(self, envs: Any) -> State:
        """State of some environments."""
        return State(self.hidden[:, envs], self.cell[:, envs])

    def keep(self, mask: Tensor) -> State:
        """Zero where `mask` (N,) is 0, untouched where it is 1: no environment sees another's state."""
        return State(self.hidden * mask.view(1, -1, 1), self.cell * mask.view(1, -1, 1))


def join_layers(states: list[State]) -> State:
    """One State that holds several memories' layers, one after the other."""
    return State(torch.cat([part.hidden for part in states]), torch.cat([part.cell for part in states]))


@dataclass(frozen=True)
class Layout:
    """Where episodes start in a (L, B) batch of sequences, and which steps are followed by one more observation."""

    starts: Bools  # (L, B) the step begins an episode; at step 0 the caller has zeroed the state instead
    extra: Bools | None = None  # (L, B) one more observation (a truncated episode's last) follows the step

    @cached_property
    def rows(self) -> Rows:
        """The same for a fused call that knows nothing of episodes."""
        return lay_out(self.starts, self.extra)


@dataclass(frozen=True)
class Rows:
    """Where the steps of a (L, B) batch lie among its control rows, as flat row numbers row * B + b."""

    n_rows: int
    plain: bool  # there is nothing but steps, and no need for row numbers
    steps: Tensor  # (L * B,)
    last: Tensor  # (B,) of each sequence's last step
    resets: Tensor  # (R,)
    extras: Tensor  # (E,) of one more observation after a step, in the order of np.nonzero(extra)


def lay_out(starts: Bools, extra: Bools | None = None) -> Rows:
    """Make room for a reset before each episode start inside a sequence and for extra observations after steps."""
    n_steps, n_sequences = starts.shape
    inner = starts.copy()
    inner[0] = False
    before = np.cumsum(inner, 0)
    if extra is not None:
        before[1:] += np.cumsum(extra, 0)[:-1]
    rows = np.arange(n_steps)[:, None] + before  # (L, B)
    tail = 0 if extra is None else extra[-1]
    n_rows = int((rows[-1] + tail).max()) + 1
    none = torch.empty(0, dtype=torch.long)
    if n_rows == n_steps and not inner.any() and (extra is None or not extra.any()):
        return Rows(n_steps, True, none, none, none, none)
    flat = rows * n_sequences + np.arange(n_sequences)
    resets = torch.from_numpy((flat - n_sequences)[inner])
    extras = none if extra is None else torch.from_numpy((flat + n_sequences)[extra])
    return Rows(n_rows, False, torch.from_numpy(flat.reshape(-1)), torch.from_numpy(flat[-1]), resets, extras)


class Unrolled(NamedTuple):
    """What a memory gives back for a batch of sequences."""

    features: Tensor  # (L, B, H) after each step
    extra_features: Tensor  # (E, H) after each extra observation
    state: State  # after the last step


class Memory(nn.Module):
    """What every memory does: one step for acting, whole sequences for learning, a zero state to begin with."""

    out_features: int
    n_layers: int
    has_cell: bool

    def initial_state(self, n: int) -> State:
        """Zero state of n environments."""
        device = next(self.parameters()).device if self.n_layers else torch.device("cpu")
        shape = (self.n_layers, n, self.out_features if self.n_layers else 0)
        return State(
            torch.zeros(shape, device=device), torch.zeros(shape if self.has_cell else (0, n, 0), device=device)
        )

    def forward(
        self, x: Tensor, state: State, layout: Layout | None = None, extra: Tensor | None = None
    ) -> tuple[Tensor, State] | Unrolled:
        """`step`, or with a layout `unroll`: called as a module, so that hooks are called too."""
        return self.step(x, state) if layout is None else self.unroll(x, layout, state, extra)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """Features (N, H) of single observations (N, F), and the state after."""
        raise NotImplementedError

    def unroll(self, x: Tensor, layout: Layout, state: State, extra: Tensor | None = None) -> Unrolled:
        """The same for whole sequences (L, B, F)."""
        raise NotImplementedError


class NoMemory(Memory):
    """Passes its input on: the policy without memory."""

    n_layers, has_cell = 0, False

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.out_features = in_features

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return x, state

    def unroll(self, x: Tensor, layout: Layout, state: State, extra: Tensor | None = None) -> Unrolled:
        return Unrolled(x, x.new_zeros(0, x.shape[-1]) if extra is None else extra, state)


class GatedMemory(Memory):
    """Layers of gated recurrences; subclasses give the gates, this class the sequences."""

    n_gates: int
    keep_bias: float
    """Bias of the gate that keeps the state (the second one) with orthogonal weights."""

    def __init__(self, in_features: int, hidden_size: int, n_layers: int, start: RecurrentInit = "orthogonal") -> None:
        super().__init__()
        self.n_layers, self.out_features = n_layers, hidden_size
        widths = [in_features] + [hidden_size] * (n_layers - 1)
        rows = self.n_gates * hidden_size
        self.input_weight = nn.ParameterList(nn.Parameter(torch.empty(rows, width)) for width in widths)
        self.hidden_weight = nn.ParameterList(nn.Parameter(torch.empty(rows, hidden_size)) for _ in widths)
        self.bias = nn.ParameterList(nn.Parameter(torch.zeros(rows)) for _ in widths)
        self.register_buffer("no_bias", torch.zeros(rows), persistent=False)
        self.no_bias: Tensor
        self.initialize(start)

    def initialize(self, start: RecurrentInit) -> None:
        """Draw weights and biases anew (docs/algorithm.md, "Memory").

        `mixed` and `uniform` draw from torch's uniform law, whose two biases are one here. In `mixed` every
        `REMEMBER_EVERY`-th unit then keeps its state for a time of its own, spread evenly in the logarithm over
        `TIME_SCALES`: a gate sigmoid(log(t - 1)) = 1 - 1/t forgets within t steps.
        """
        size, bound = self.out_features, self.out_features**-0.5
        for layer in range(self.n_layers):
            matrices, bias = (self.input_weight[layer].data, self.hidden_weight[layer].data), self.bias[layer].data
            keep = bias[size : 2 * size]
            if start == "orthogonal":
                for gate in (gate for matrix in matrices for gate in matrix.split(size)):
                    nn.init.orthogonal_(gate)
                nn.init.zeros_(bias)
                nn.init.constant_(keep, self.keep_bias)
                continue
            for matrix in matrices:
                nn.init.uniform_(matrix, -bound, bound)
            bias.copy_(torch.empty(2, len(bias)).uniform_(-bound, bound).sum(0))
            if start == "mixed":
                times = np.geomspace(*TIME_SCALES, len(keep[::REMEMBER_EVERY]))
                keep[::REMEMBER_EVERY] = torch.from_numpy(np.log(times - 1.0))

    def control_columns(self, layer: int) -> Tensor:
        """(rows, 2) input weights of the reset and hold channels."""
        raise NotImplementedError

    def fused(self, x: Tensor, layer: int, weight: Tensor, state: State) -> tuple[Tensor, State]:
        """One layer over all rows: features (rows, B, H) and the layer's last state (1, B, H)."""
        raise NotImplementedError

    def unroll(self, x: Tensor, layout: Layout, state: State, extra: Tensor | None = None) -> Unrolled:
        """Run whole sequences (L, B, F) from `state` in one fused call per layer."""
        rows = layout.rows
        controls = None if rows.plain else control_channels(rows, x.shape[1], x)
        features = x if controls is None else insert_rows(x, rows, extra)
        hidden, cell = [], []
        for layer in range(self.n_layers):
            weight = self.input_weight[layer]
            if controls is not None:
                features = torch.cat([features, controls], -1)
                weight = torch.cat([weight, self.control_columns(layer)], -1)
            layer_state = State(state.hidden[layer : layer + 1], state.cell[layer : layer + 1])
            features, last = self.fused(features, layer, weight, layer_state)
            hidden.append(last.hidden if rows.plain else rows_of(features, rows.last).unsqueeze(0))
            cell.append(last.cell)
        final = State(torch.cat(hidden), torch.cat(cell))
        if rows.plain:
            return Unrolled(features, features.new_zeros(0, self.out_features), final)
        steps = rows_of(features, rows.steps).view(*x.shape[:2], self.out_features)
        return Unrolled(steps, rows_of(features, rows.extras), final)


def control_channels(layout: Rows, n_sequences: int, like: Tensor) -> Tensor:
    """(rows, B, 2) the reset and hold channels: zero on steps, hold everywhere else but on resets."""
    controls = like.new_zeros(layout.n_rows * n_sequences, 2)
    controls[:, 1] = 1.0
    controls[layout.steps, 1] = 0.0
    controls[layout.extras, 1] = 0.0
    controls[layout.resets, 1] = 0.0
    controls[layout.resets, 0] = 1.0
    return controls.view(layout.n_rows, n_sequences, 2)


def insert_rows(x: Tensor, layout: Rows, extra: Tensor | None) -> Tensor:
    """(rows, B, F) with the steps and the extra observations in their rows and zeros elsewhere."""
    n_sequences, width = x.shape[1:]
    rows = x.new_zeros(layout.n_rows * n_sequences, width).index_copy(0, layout.steps, x.reshape(-1, width))
    if extra is not None and len(extra):
        rows = rows.index_copy(0, layout.extras, extra)
    return rows.view(layout.n_rows, n_sequences, width)


def rows_of(features: Tensor, rows: Tensor) -> Tensor:
    """Flat rows of a (rows, B, H) tensor."""
    return features.reshape(-1, features.shape[-1]).index_select(0, rows)


class LSTM(GatedMemory):
    """Long short-term memory (eq. 1); gates in torch's order: input, forget, candidate, output."""

    n_gates, has_cell, keep_bias = 4, True, 1.0

    def is_known(self) -> bool:
        """Whether it is exactly what the native core computes: no subclass, no hook, all float32 on the CPU."""
        lists = (self.input_weight, self.hidden_weight, self.bias)
        return (
            is_plain(self, LSTM)
            and all(is_plain(part, nn.ParameterList) and len(part) == self.n_layers for part in lists)
            and all(part.device.type == "cpu" and part.dtype == torch.float32 for part in self.parameters())
        )

    def control_columns(self, layer: int) -> Tensor:
        columns = self.no_bias.new_zeros(4, self.out_features, 2)
        columns[[0, 1, 3], :, 0] = -SATURATE  # reset: nothing in, nothing kept, nothing out
        columns[0, :, 1], columns[1, :, 1] = -SATURATE, SATURATE  # hold: nothing in, all kept
        return columns.view(-1, 2)

    def fused(self, x: Tensor, layer: int, weight: Tensor, state: State) -> tuple[Tensor, State]:
        parameters = [weight, self.hidden_weight[layer], self.bias[layer], self.no_bias]
        features, hidden, cell = torch.lstm(
            x, (state.hidden, state.cell), parameters, True, 1, 0.0, self.training, False, False
        )
        return features, State(hidden, cell)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, cell = [], []
        for layer in range(self.n_layers):
            x, c = torch.lstm_cell(
                x,
                (state.hidden[layer], state.cell[layer]),
                self.input_weight[layer],
                self.hidden_weight[layer],
                self.bias[layer],
                self.no_bias,
            )
            hidden.append(x)
            cell.append(c)
        return x, State(torch.stack(hidden), torch.stack(cell))


class GRU(GatedMemory):
    """Gated recurrent unit; gates in torch's order: reset, update, candidate."""

    n_gates, has_cell, keep_bias = 3, False, 0.0

    def control_columns(self, layer: int) -> Tensor:
        columns = self.no_bias.new_zeros(3, self.out_features, 2)
        columns[0, :, 0], columns[1, :, 0] = -SATURATE, -SATURATE  # reset: forget the past,
        columns[2, :, 0] = -self.bias[layer][2 * self.out_features :]  # and a candidate of exactly zero
        columns[1, :, 1] = SATURATE  # hold: keep all of the past
        return columns.view(-1, 2)

    def fused(self, x: Tensor, layer: int, weight: Tensor, state: State) -> tuple[Tensor, State]:
        parameters = [weight, self.hidden_weight[layer], self.bias[layer], self.no_bias]
        features, hidden = torch.gru(x, state.hidden, parameters, True, 1, 0.0, self.training, False, False)
        return features, State(hidden, state.cell)

    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        hidden = []
        for layer in range(self.n_layers):
            x = torch.gru_cell(
                x,
                state.hidden[layer],
                self.input_weight[layer],
                self.hidden_weight[layer],
                self.bias[layer],
                self.no_bias,
            )
            hidden.append(x)
        return x, State(torch.stack(hidden), state.cell)


def make_memory(
    kind: str, in_features: int, hidden_size: int, n_layers: int, start: RecurrentInit = "orthogonal"
) -> Memory:
    """`lstm`, `gru`, or `none`."""
    if kind == "none":
        return NoMemory(in_features)
    return {"lstm": LSTM, "gru": GRU}[kind](in_features, hidden_size, n_layers, start)
