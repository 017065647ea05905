"""One step of a trunk for many environments in one compiled call: what acting spends its time on.

Weights are packed once per rollout, as [weights; bias] that multiply [input, 1]; they do not follow later changes of
the policy. Trunks the kernel does not know (GRU, other activations, other devices) step in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from tailguard.policy.lstm_kernel import NO_TRANSPOSE, ZERO, compiled, multiply, sgemm_address, sigmoid, tanh
from tailguard.policy.recurrent import LSTM, Memory, State

Step = Callable[[Tensor, State], tuple[Tensor, State]]


def stepper(memory: Memory, layers: nn.Sequential, n: int) -> Step:
    """A function (observations (n, F), state) -> (features (n, W), state after) with the weights as they are now."""
    kinds = {type(module) for module in layers}
    on_cpu = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in memory.parameters())
    if isinstance(memory, LSTM) and on_cpu and (kinds <= {nn.Linear, nn.Tanh} or kinds <= {nn.Linear, nn.ReLU}):
        return CompiledTrunk(memory, layers, n)

    def step(x: Tensor, state: State) -> tuple[Tensor, State]:
        features, state = memory.step(x, state)
        return layers(features), state

    return step


class CompiledTrunk:
    """LSTM layers, then linear layers with tanh or ReLU."""

    def __init__(self, memory: LSTM, layers: nn.Sequential, n: int) -> None:
        linear = [module for module in layers if isinstance(module, nn.Linear)]
        recurrent = [
            torch.cat([hidden.t(), entry.t(), bias.unsqueeze(0)])
            for hidden, entry, bias in zip(memory.hidden_weight, memory.input_weight, memory.bias, strict=True)
        ]
        dense = [torch.cat([layer.weight.t(), layer.bias.unsqueeze(0)]) for layer in linear]
        self.weights = tuple(weight.detach().numpy() for weight in (*recurrent, *dense))
        widths = [len(weight) for weight in self.weights] + [memory.out_features if not dense else dense[-1].shape[1]]
        self.inputs = tuple(np.ones((n, width), np.float32) for width in widths)  # the last column stays one
        self.sizes = np.array([self.product(k, memory.n_layers) for k in range(len(self.weights))], np.int32)
        self.gates = np.empty((n, 4, memory.out_features), np.float32)
        self.n_recurrent, self.rectify = memory.n_layers, any(isinstance(module, nn.ReLU) for module in layers)
        self.letters, self.factors = np.array([NO_TRANSPOSE] * 2, np.uint8), np.array([1.0, 0.0], np.float32)

    def product(self, k: int, n_recurrent: int) -> tuple[int, ...]:
        """Sizes and strides of the k-th product: gates go into their own array, layers into the next one's input."""
        depth, width = self.weights[k].shape
        stride = width if k < n_recurrent else self.inputs[k + 1].shape[1]
        return width, len(self.inputs[0]), depth, width, depth, stride

    def __call__(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        hidden, cell = np.empty(state.hidden.shape, np.float32), np.empty(state.cell.shape, np.float32)
        step_kernel(
            sgemm_address(),
            self.letters,
            self.sizes,
            self.factors,
            self.weights,
            self.inputs,
            self.gates,
            x.numpy(),
            state.hidden.numpy(),
            state.cell.numpy(),
            hidden,
            cell,
            self.n_recurrent,
            self.rectify,
        )
        return torch.from_numpy(self.inputs[-1].copy()), State(torch.from_numpy(hidden), torch.from_numpy(cell))


@compiled
def step_kernel(  # type: ignore[no-untyped-def]
    sgemm, letters, sizes, factors, weights, inputs, gates, x, hidden, cell, new_hidden, new_cell, n_recurrent, rectify
):
    """Fill the new state and the last of `inputs`, which is the trunk's output."""
    n, n_units = x.shape[0], gates.shape[2]
    for k in range(n_recurrent):
        entry = inputs[k]
        n_entries = entry.shape[1] - n_units - 1
        for b in range(n):
            for j in range(n_units):
                entry[b, j] = hidden[k, b, j]
            for j in range(n_entries):
                entry[b, n_units + j] = x[b, j] if k == 0 else new_hidden[k - 1, b, j]
        multiply(sgemm, letters, sizes[k], factors, weights[k].ctypes.data, entry.ctypes.data, gates.ctypes.data)
        for b in range(n):
            for j in range(n_units):
                gates[b, 0, j] = sigmoid(gates[b, 0, j])
            for j in range(n_units):
                gates[b, 1, j] = sigmoid(gates[b, 1, j])
            for j in range(n_units):
                gates[b, 2, j] = tanh(gates[b, 2, j])
            for j in range(n_units):
                gates[b, 3, j] = sigmoid(gates[b, 3, j])
            for j in range(n_units):
                new_cell[k, b, j] = gates[b, 1, j] * cell[k, b, j] + gates[b, 0, j] * gates[b, 2, j]
            for j in range(n_units):
                new_hidden[k, b, j] = gates[b, 3, j] * tanh(new_cell[k, b, j])
    after = inputs[n_recurrent]
    for b in range(n):
        for j in range(n_units):
            after[b, j] = new_hidden[n_recurrent - 1, b, j]
    for k in range(n_recurrent, len(weights)):
        out = inputs[k + 1]
        multiply(sgemm, letters, sizes[k], factors, weights[k].ctypes.data, inputs[k].ctypes.data, out.ctypes.data)
        for b in range(n):
            for j in range(weights[k].shape[1]):
                out[b, j] = max(out[b, j], ZERO) if rectify else tanh(out[b, j])
