"""One step of a trunk for many environments in one compiled call: what acting spends its time on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from tailguard.loops import compiled
from tailguard.policy.blas import blas
from tailguard.policy.recurrent import LSTM, State
from tailguard.policy.trunk_kernel import Seen, last_out, pack, room_for, shape_of, trunk_forward

Step = Callable[[Tensor, State], tuple[Tensor, State]]


class CompiledStep:
    """(observations (n, F), state) -> (output (n, W) of the last linear layer, state after).

    The weights are those of the moment it is made; `state` must be zero where an episode starts.
    """

    def __init__(self, memory: LSTM, linear: Sequence[nn.Linear], activation: str, n: int) -> None:
        parameters = [*memory.parameters(), *(part for layer in linear for part in (layer.weight, layer.bias))]
        begins = dict(zip(map(id, parameters), np.cumsum([0, *(p.numel() for p in parameters)]), strict=False))
        self.shape = shape_of(memory, linear, activation, lambda parameter: int(begins[id(parameter)]))
        self.flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters]).numpy()
        self.room, self.blas = room_for(self.shape, 1, n), blas()
        self.starts = np.zeros((1, n), np.bool_)
        pack(self.shape, self.flat, self.room.packed)

    def __call__(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        seen = Seen(x.numpy()[None], self.starts, state.hidden.numpy(), state.cell.numpy())
        output, hidden, cell = step_kernel(self.blas, self.shape, self.flat, self.room, seen)
        return torch.from_numpy(output), State(torch.from_numpy(hidden), torch.from_numpy(cell))


@compiled
def step_kernel(blas, shape, flat, room, seen):  # type: ignore[no-untyped-def]
    """Output, hidden state and cell in memory of their own."""
    trunk_forward(blas, shape, flat, room, seen, 0, room.kept.shape[1])
    return last_out(shape, room, room.outs).copy(), room.hidden[:, 0].copy(), room.cells[:, 0].copy()
