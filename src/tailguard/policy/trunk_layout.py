"""Where the weights of a trunk lie: one flat array of parameters, and copies of it as the products read them.

One compilation serves every architecture: all sizes are numbers, found in a `Shape`.

Arrays: H units, F inputs; K = H + F + 1 columns of the memory's weights, [hidden | input | bias].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tailguard.loops import compiled
from tailguard.policy.products import COLUMNS, Array, holds_pairs, n_panels_of
from tailguard.policy.recurrent import LSTM


class Shape(NamedTuple):
    """Where the weights of a trunk lie in the flat array."""

    n_layers: int  # of memory
    n_units: int
    n_inputs: int
    recurrent: Array  # (layers, 3) where hidden weights, input weights and biases begin
    dense: Array  # (linear layers, 4) where weights and biases begin; outputs, inputs
    rectify: bool  # ReLU between the linear layers, or tanh; nothing follows the last
    rounded: bool  # to bfloat16 on the way there: factors of all layers but the last


def shape_of(
    memory: LSTM, linear: Sequence[nn.Linear], activation: str, begins: Callable[[Tensor], int], rounded: bool
) -> Shape:
    """`begins` says where a parameter lies."""
    parts = zip(memory.hidden_weight, memory.input_weight, memory.bias, strict=True)
    return Shape(
        memory.n_layers,
        memory.out_features,
        int(memory.input_weight[0].shape[1]),
        np.array([[begins(part) for part in layer] for layer in parts], np.int64),
        dense_of(linear, begins),
        activation == "relu",
        rounded,
    )


def weights_of(
    memory: LSTM, linear: Sequence[nn.Linear], activation: str, rounded: bool = False
) -> tuple[Shape, Array]:
    """A copy of a trunk's weights as they are now, and where each of them lies in it."""
    parameters = [*memory.parameters(), *(part for layer in linear for part in (layer.weight, layer.bias))]
    flat, begins = in_one(parameters)
    return shape_of(memory, linear, activation, begins, rounded), flat


def in_one(parameters: Sequence[Tensor]) -> tuple[Array, Callable[[Tensor], int]]:
    """A copy of parameters one after another, and where each begins in it."""
    begins = dict(zip(map(id, parameters), np.cumsum([0, *(p.numel() for p in parameters)]), strict=False))
    flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters]).numpy()
    return flat, lambda parameter: int(begins[id(parameter)])


def known_to_loops(weight: Tensor) -> bool:
    """Whether compiled loops can read it where it lies."""
    return weight.device.type == "cpu" and weight.dtype == torch.float32


def layers_of(linear: Sequence[nn.Linear], begins: Callable[[Tensor], int], rectify: bool = False) -> Shape:
    """Linear layers with tanh or ReLU between them, and no memory."""
    n_inputs = linear[0].in_features if linear else 0
    return Shape(0, 0, n_inputs, np.zeros((0, 3), np.int64), dense_of(linear, begins), rectify, False)


def dense_of(linear: Sequence[nn.Linear], begins: Callable[[Tensor], int]) -> Array:
    """(linear layers, 4) as a shape has them."""
    rows = [(begins(layer.weight), begins(layer.bias), layer.out_features, layer.in_features) for layer in linear]
    return np.array(rows, np.int64).reshape(-1, 4)


def aligned_zeros(*extents: int) -> Array:
    """Zeros that begin with a line of the cache, as torch's tensors do."""
    return torch.zeros(extents).numpy()


# parameters


@compiled
def columns(shape, k):  # type: ignore[no-untyped-def]
    """K of a layer of memory."""
    return shape.n_units + (shape.n_inputs if k == 0 else shape.n_units) + 1


@compiled
def columns_before(shape, k):  # type: ignore[no-untyped-def]
    return 0 if k == 0 else columns(shape, 0) + (k - 1) * columns(shape, 1)


@compiled
def memory_size(shape):  # type: ignore[no-untyped-def]
    """Number of the memory's weights."""
    return 4 * shape.n_units * columns_before(shape, shape.n_layers)


@compiled
def memory_of(shape, gradient, k):  # type: ignore[no-untyped-def]
    """(K, 4H) of a lane's gradient."""
    rows, width = columns(shape, k), 4 * shape.n_units
    first = width * columns_before(shape, k)
    return gradient[first : first + rows * width].reshape(rows, width)


@compiled
def weight_of(shape, flat, k):  # type: ignore[no-untyped-def]
    """(outputs, inputs) of the k-th linear layer."""
    first, _, n_out, n_in = shape.dense[k]
    return flat[first : first + n_out * n_in].reshape(n_out, n_in)


@compiled
def bias_of(shape, flat, k):  # type: ignore[no-untyped-def]
    return flat[shape.dense[k, 1] : shape.dense[k, 1] + shape.dense[k, 2]]


@compiled
def recurrent_of(shape, flat, k):  # type: ignore[no-untyped-def]
    """(4H, H) hidden weights, (4H, F) input weights and (4H,) biases of a layer of memory."""
    rows, n_inputs = 4 * shape.n_units, columns(shape, k) - shape.n_units - 1
    hidden, entry, bias = shape.recurrent[k]
    return (
        flat[hidden : hidden + rows * shape.n_units].reshape(rows, shape.n_units),
        flat[entry : entry + rows * n_inputs].reshape(rows, n_inputs),
        flat[bias : bias + rows],
    )


# as the products read them


@compiled
def panels_at(packed, first, height, width):  # type: ignore[no-untyped-def]
    """(panels, height, COLUMNS) of the packed weights, of a matrix of such a width."""
    n_panels = n_panels_of(width)
    return packed[first : first + n_panels * height * COLUMNS].reshape(n_panels, height, COLUMNS)


@compiled
def packed_before(shape, k):  # type: ignore[no-untyped-def]
    """Where the weights of the k-th layer of memory begin among the packed ones."""
    return COLUMNS * n_panels_of(4 * shape.n_units) * columns_before(shape, k)


@compiled
def packed_of(shape, packed, k):  # type: ignore[no-untyped-def]
    """(K, 4H) of the memory's packed weights, in panels."""
    return panels_at(packed, packed_before(shape, k), columns(shape, k), 4 * shape.n_units)


@compiled
def turned_before(shape, k):  # type: ignore[no-untyped-def]
    """Where the k-th linear layer begins among the packed weights."""
    place = packed_before(shape, shape.n_layers)
    for i in range(k):
        place += COLUMNS * n_panels_of(shape.dense[i, 2]) * shape.dense[i, 3]
    return place


@compiled
def turned_of(shape, packed, k):  # type: ignore[no-untyped-def]
    """(inputs, outputs) of the k-th linear layer, in panels."""
    return panels_at(packed, turned_before(shape, k), shape.dense[k, 3], shape.dense[k, 2])


def room_for_packed(shape: Shape) -> Array:
    return aligned_zeros(turned_before(shape, len(shape.dense)))


@compiled
def n_matrices(shape):  # type: ignore[no-untyped-def]
    """That the way back goes through: hidden and input weights of the memory, then the linear layers."""
    return 2 * shape.n_layers + len(shape.dense)


@compiled
def matrix_of(shape, flat, i):  # type: ignore[no-untyped-def]
    """The i-th of them, (outputs, inputs)."""
    if i < shape.n_layers:
        return recurrent_of(shape, flat, i)[0]
    if i < 2 * shape.n_layers:
        return recurrent_of(shape, flat, i - shape.n_layers)[1]
    return weight_of(shape, flat, i - 2 * shape.n_layers)


@compiled
def matrix_extents(shape, i):  # type: ignore[no-untyped-def]
    if i < shape.n_layers:
        return 4 * shape.n_units, shape.n_units
    if i < 2 * shape.n_layers:
        return 4 * shape.n_units, columns(shape, i - shape.n_layers) - shape.n_units - 1
    return shape.dense[i - 2 * shape.n_layers, 2], shape.dense[i - 2 * shape.n_layers, 3]


@compiled
def back_of(shape, back, i):  # type: ignore[no-untyped-def]
    """The i-th of them as it was laid out for the way back, in panels; where `back` holds pairs, of rows."""
    first = 0
    for k in range(i + 1):
        height, width = matrix_extents(shape, k)
        height = -(-height // 2) if holds_pairs(back) else height
        size = n_panels_of(width) * height * COLUMNS
        first += size if k < i else 0
    return back[first : first + size].reshape(n_panels_of(width), height, COLUMNS)


def room_for_back(shape: Shape, in_pairs: bool) -> Array:
    """For all of them, float32 or pairs of bfloat16."""
    extents = [matrix_extents(shape, i) for i in range(n_matrices(shape))]
    heights = [-(-height // 2) if in_pairs else height for height, _ in extents]
    size = sum(COLUMNS * n_panels_of(width) * height for height, (_, width) in zip(heights, extents, strict=True))
    room = aligned_zeros(size)
    return room.view(np.uint32) if in_pairs else room
