"""Weights turned for the way there, and gradients turned back, as the loops of trunk_kernel.py want them."""

from __future__ import annotations

from tailguard.loops import BLOCK, arrays_apart, compiled, turn_block, wide_vectors
from tailguard.policy.pairs import paired_panels, round_panels
from tailguard.policy.products import COLUMNS, Array, holds_pairs, lay_out_panels
from tailguard.policy.trunk_layout import (
    Shape,
    back_of,
    matrix_of,
    memory_of,
    memory_size,
    n_matrices,
    packed_of,
    recurrent_of,
    room_for_back,
    room_for_packed,
    turned_of,
    weight_of,
)


def packed_weights(shape: Shape, flat: Array) -> Array:
    """A trunk's weights for the way there."""
    packed = room_for_packed(shape)
    pack(shape, flat, packed)
    return packed


def packed_for_back(shape: Shape, flat: Array) -> Array:
    """And for the way back, in float32."""
    back = room_for_back(shape, in_pairs=False)
    pack_back(shape, flat, back)
    return back


@compiled
def pack(shape, flat, packed):  # type: ignore[no-untyped-def]
    """Lay weights out for the way there, turned: [hidden | input | bias] of the memory, then the linear layers.

    Where a shape is `rounded`, they become pairs of bfloat16; the last layer does not: its unit moves with the return
    scale, and what it says must not.
    """
    n_units = shape.n_units
    for k in range(shape.n_layers):
        panels, (hidden, entry, bias) = packed_of(shape, packed, k), recurrent_of(shape, flat, k)
        turn_into_panels(hidden, panels[:, :n_units])
        turn_into_panels(entry, panels[:, n_units:-1])
        turn_into_panels(bias.reshape(len(bias), 1), panels[:, -1:])
        if shape.rounded:
            round_panels(panels)
    for k in range(len(shape.dense)):
        turned = turned_of(shape, packed, k)
        turn_into_panels(weight_of(shape, flat, k), turned[:, :])
        if shape.rounded and k < len(shape.dense) - 1:
            round_panels(turned)


@compiled
def turn_into_panels(matrix, panels):  # type: ignore[no-untyped-def]
    """The transpose of (N, K) in panels (N / COLUMNS or more, K, COLUMNS); what lies beyond its last column stays."""
    for p in range(len(panels)):
        rows = matrix[COLUMNS * p : COLUMNS * (p + 1)]
        turn(rows, False, panels[p, :, : len(rows)])


@compiled
def pack_back(shape, flat, back):  # type: ignore[no-untyped-def]
    """Lay weights out for the way back, rounded to pairs of bfloat16 where `back` holds such."""
    for i in range(n_matrices(shape)):
        if holds_pairs(back):
            paired_panels(matrix_of(shape, flat, i), back_of(shape, back, i))
        else:
            lay_out_panels(matrix_of(shape, flat, i), back_of(shape, back, i))


@compiled
def add_lanes(shape, first, second, added, result):  # type: ignore[no-untyped-def]
    """The sum of two lanes' gradients, each in its place; with `added`, beside what is there. `first` is used up.

    first, second: (P,) the memory's turned, [hidden | input | bias] per layer, the others as they are
    """
    n_units, after = shape.n_units, memory_size(shape)
    add_to(first, second)
    for k in range(shape.n_layers):
        rows, (hidden, entry, bias) = memory_of(shape, first, k), recurrent_of(shape, result, k)
        turn(rows[:n_units], added, hidden)
        turn(rows[n_units:-1], added, entry)
        hand_over(rows[-1], added, bias)
    hand_over(first[after:], added, result[after:])


@compiled
def add_to(sum_, more):  # type: ignore[no-untyped-def]
    wide_vectors()
    arrays_apart()
    for i in range(len(sum_)):
        sum_[i] += more[i]


@compiled
def hand_over(row, added, result):  # type: ignore[no-untyped-def]
    wide_vectors()
    arrays_apart()
    for i in range(len(row)):
        result[i] = result[i] + row[i] if added else row[i]


@compiled
def turn(matrix, added, result):  # type: ignore[no-untyped-def]
    """The transpose of a matrix, alone or beside what is there, block by block; each has rows of contiguous numbers."""
    wide_vectors()
    height, width = matrix.shape
    down, across = matrix.strides[0], result.strides[0]
    whole_height, whole_width = (0, 0) if added else (height // BLOCK * BLOCK, width // BLOCK * BLOCK)
    for i in range(0, whole_height, BLOCK):
        for j in range(0, whole_width, BLOCK):
            here, there = matrix.ctypes.data + i * down + 4 * j, result.ctypes.data + j * across + 4 * i
            turn_block(here, down, there, across)
    turn_loosely(matrix[:whole_height, whole_width:], added, result[whole_width:, :whole_height])
    turn_loosely(matrix[whole_height:], added, result[:, whole_height:])


@compiled
def turn_loosely(matrix, added, result):  # type: ignore[no-untyped-def]
    height, width = matrix.shape
    for j in range(width):
        for i in range(height):
            result[j, i] = result[j, i] + matrix[i, j] if added else matrix[i, j]
