"""One step of a trunk for many environments in one compiled call: what acting spends its time on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tailguard.loops import borrowed, compiled
from tailguard.policy.action_heads import ActionHead
from tailguard.policy.packing import packed_weights
from tailguard.policy.products import Array
from tailguard.policy.recurrent import LSTM, State
from tailguard.policy.trunk_kernel import Room, Seen, copy_row, last_out, room_for, trunk_forward
from tailguard.policy.trunk_layout import Shape, weights_of

Step = Callable[[Tensor, State], tuple[Tensor, State]]
N_SHAPE = len(Shape._fields)


class CompiledStep:
    """(observations (n, F), state) -> (output (n, W) of the last linear layer, state after).

    The weights are those of the moment it is made; `state` must be zero where an episode starts.
    """

    def __init__(self, memory: LSTM, linear: Sequence[nn.Linear], activation: str, n: int) -> None:
        shape, self.flat = weights_of(memory, linear, activation)
        self.packed = packed_weights(shape, self.flat)
        self.starts, self.all = np.zeros((1, n), np.bool_), np.arange(n)
        self.parts = (*shape, *room_for(shape, 1, n))
        self.output_extent, self.state_extent = (n, linear[-1].out_features), (shape.n_layers, n, shape.n_units)
        self.after: tuple[State, Array, Array] | None = None  # the last step: a state, and its memory as arrays

    def __call__(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        output, state = self.on_arrays(x.numpy(), state)
        return torch.from_numpy(output), state

    def on_arrays(self, x: Array, state: State) -> tuple[Array, State]:
        """The same, for observations and output as arrays."""
        output, hidden = np.empty(self.output_extent, np.float32), np.empty(self.state_extent, np.float32)
        cell, before = np.empty_like(hidden), self.arrays_of(state)
        seen = x[None], self.starts, *before, self.all
        step_kernel(output, hidden, cell, *seen, self.flat, self.packed, *self.parts)
        after = State(torch.from_numpy(hidden), torch.from_numpy(cell))
        self.after = after, hidden, cell
        return output, after

    def arrays_of(self, state: State) -> tuple[Array, Array]:
        """Hidden state and cell; torch is asked only for what is not the state after the last step."""
        if self.after is not None and state is self.after[0]:
            return self.after[1:]
        return state.hidden.numpy(), state.cell.numpy()


@compiled
def step_kernel(output, next_hidden, next_cell, x, starts, hidden, cell, chosen, flat, packed, *parts):  # type: ignore[no-untyped-def]
    """Fill output, hidden state and cell: numba hands arrays back at the price of a small step.

    parts: all of Shape and Room, one by one: numba takes named tuples at four times the price of their parts
    """
    shape, room = borrowed((Shape(*parts[:N_SHAPE]), Room(*parts[N_SHAPE:])))
    seen = borrowed(Seen(x, starts, hidden, cell, chosen))
    trunk_forward(shape, borrowed(flat), borrowed(packed), room, seen, 0, room.kept.shape[1])
    copy_row(last_out(shape, room, room.outs).reshape(output.size), output.reshape(output.size))
    size = next_hidden.size  # rooms hold one step
    copy_row(room.hidden.reshape(size), next_hidden.reshape(size))
    copy_row(room.cells.reshape(size), next_cell.reshape(size))


class Acting:
    """A policy through the steps of a rollout: it has the chance of all of them ready, and keeps what it put out.

    chance: (T, n, A) as `ActionHead.prepared` gives it
    """

    def __init__(self, step: Step, head: ActionHead, chance: Tensor) -> None:
        self.step, self.head, self.chance = step, head, chance
        self.outputs: list[Tensor] = []

    def act(self, t: int, observations: NDArray[np.float32], state: State) -> tuple[NDArray[np.float32], State]:
        """Actions (n, A) of step t on observations (n, F), and the state after."""
        output, state = self.step(torch.from_numpy(observations).to(self.chance.device), state)
        self.outputs.append(output)
        return self.head.act(output, self.chance[t]).numpy(force=True), state

    def said(self) -> Tensor:
        """(T, n, W) the last layer's outputs of all steps."""
        return torch.stack(self.outputs)

    def parameters(self) -> Tensor:
        """(T, n, P) of all steps' action laws."""
        return self.head.law(self.said())


class CompiledActing(Acting):
    """The same without tensors at any step."""

    def __init__(self, step: CompiledStep, head: ActionHead, chance: Tensor) -> None:
        super().__init__(step, head, chance)
        self.compiled_step, self.prepared = step, chance.numpy(force=True)
        self.kept = np.empty((len(self.prepared), *step.output_extent), np.float32)

    def act(self, t: int, observations: NDArray[np.float32], state: State) -> tuple[NDArray[np.float32], State]:
        if observations.dtype != np.float32 or not observations.flags.carray:
            observations = np.require(observations, np.float32, ["C", "W"])  # one layout, one compilation
        output, state = self.compiled_step.on_arrays(observations, state)
        self.kept[t] = output
        return self.head.act_on_array(output, self.prepared[t]), state

    def said(self) -> Tensor:
        return torch.from_numpy(self.kept)
