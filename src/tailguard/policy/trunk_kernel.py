"""A trunk and the last layer of its head in compiled loops, there and back.

All weights are read from one flat array, and all gradients are added to another of the same layout, so that one
compilation serves every architecture. Intermediate results go to room that is used again for the next batch.

Arrays: L steps, B sequences of a batch, b of them at a time, H units, F inputs; K = H + F + 1 columns of
[hidden | input | 1] and of their weights, [hidden | input | bias].
"""

from __future__ import annotations

from typing import NamedTuple

from tailguard.loops import arrays_apart, compiled, wide_vectors
from tailguard.policy.lstm_kernel import ONE, ZERO, backward_kernel, forward_kernel, tanh
from tailguard.policy.pairs import apply_weights, pull_back, weigh
from tailguard.policy.products import COLUMNS, Array, n_panels_of
from tailguard.policy.trunk_layout import (
    Shape,
    aligned_zeros,
    back_of,
    bias_of,
    columns,
    memory_of,
    packed_of,
    turned_of,
    weight_of,
)

ACTIVATIONS = ("tanh", "relu")
APART = 16  # float32, a line of the cache


class Room(NamedTuple):
    """Where the results of b sequences go."""

    kept: Array  # (L, b) 0 where an episode starts, 1 elsewhere
    first: Array  # (layers, b, H) cells before the first step
    joined: Array  # (L, b, K or more) per layer
    gates: Array  # (layers, L, b, 4H and some apart)
    cells: Array  # (layers, L, b, H)
    squashed: Array  # (layers, L, b, H) tanh of the cells
    hidden: Array  # (layers, L, b, H)
    d_hidden: Array  # (L, b, H)
    d_past: Array  # (2, b, H) of hidden states and cells one step back
    outs: Array  # (L b, outputs) per linear layer
    d_outs: Array  # their gradients


class Seen(NamedTuple):
    """What a trunk reads of S sequences, of which a batch holds B."""

    x: Array  # (L, S, F)
    starts: Array  # (L, S)
    hidden: Array  # (layers, S, H) before the first step
    cell: Array  # (layers, S, H)
    chosen: Array  # (B,) where the batch's sequences lie


def room_for(shape: Shape, n_steps: int, n_sequences: int) -> Room:
    """Room for that many sequences at a time."""
    layers, units = shape.n_layers, shape.n_units
    n_columns = joined_before(shape, layers)
    n_outputs = int(shape.dense[:, 2].sum())

    return Room(
        kept=aligned_zeros(n_steps, n_sequences),
        first=aligned_zeros(layers, n_sequences, units),
        joined=aligned_zeros(n_steps * n_sequences * n_columns),
        gates=aligned_zeros(layers, n_steps, n_sequences, 4 * units + APART),
        cells=aligned_zeros(layers, n_steps, n_sequences, units),
        squashed=aligned_zeros(layers, n_steps, n_sequences, units),
        hidden=aligned_zeros(layers, n_steps, n_sequences, units),
        d_hidden=aligned_zeros(n_steps, n_sequences, units),
        d_past=aligned_zeros(2, n_sequences, units),
        outs=aligned_zeros(n_steps * n_sequences * n_outputs),
        d_outs=aligned_zeros(n_steps * n_sequences * n_outputs),
    )


# where things are


@compiled
def joined_before(shape, k):  # type: ignore[no-untyped-def]
    """Columns of the layers before, each with so many to spare that every row begins with a line of the cache."""
    n_columns = 0
    for i in range(k):
        n_columns += n_panels_of(columns(shape, i)) * COLUMNS
    return n_columns


@compiled
def joined_of(shape, room, k):  # type: ignore[no-untyped-def]
    """(L, b, K or more)"""
    n_steps, size = room.kept.shape
    width = n_panels_of(columns(shape, k)) * COLUMNS
    first = n_steps * size * joined_before(shape, k)
    return room.joined[first : first + n_steps * size * width].reshape(n_steps, size, width)


@compiled
def out_of(shape, outs, rows, k):  # type: ignore[no-untyped-def]
    """(rows, outputs) of the k-th linear layer."""
    first = rows * shape.dense[:k, 2].sum()
    width = shape.dense[k, 2]
    return outs[first : first + rows * width].reshape(rows, width)


@compiled
def last_out(shape, room, outs):  # type: ignore[no-untyped-def]
    return out_of(shape, outs, room.kept.size, len(shape.dense) - 1)


@compiled
def features_of(shape, room):  # type: ignore[no-untyped-def]
    """(rows, H) what the last layer reads."""
    n_steps, size, n_units = room.d_hidden.shape
    before = len(shape.dense) - 2
    if before >= 0:
        return out_of(shape, room.outs, n_steps * size, before)
    return room.hidden[shape.n_layers - 1].reshape(n_steps * size, n_units)


# there


@compiled
def trunk_forward(shape, flat, packed, room, seen, low, high):  # type: ignore[no-untyped-def]
    """Fill the room for sequences low .. high of a batch (as many as it holds; the rest sees zeros)."""
    take_up(shape, room, seen, low, high)
    n_steps, size, n_units = room.d_hidden.shape
    for k in range(shape.n_layers):
        joined, hidden = joined_of(shape, room, k), room.hidden[k]
        last = columns(shape, k) - 1
        for t in range(n_steps):
            for i in range(size):
                joined[t, i, last] = ONE
        if k > 0:
            joined[:, :, n_units : 2 * n_units] = room.hidden[k - 1]
        forward_kernel(
            packed_of(shape, packed, k),
            shape.rounded,
            room.kept,
            room.first[k],
            joined,
            room.gates[k],
            room.cells[k],
            room.squashed[k],
            hidden,
        )
    top = room.hidden[shape.n_layers - 1].reshape(n_steps * size, n_units)
    dense_forward(shape, flat, packed, top, room.outs)


@compiled
def take_up(shape, room, seen, low, high):  # type: ignore[no-untyped-def]
    """Copy inputs, first states and episode starts."""
    n_steps, size, n_units = room.d_hidden.shape
    n_there = min(size, high - low)
    for k in range(shape.n_layers):
        hidden, cell = joined_of(shape, room, k)[0], room.first[k]
        for i in range(n_there):
            s = seen.chosen[low + i]
            copy_row(seen.hidden[k, s], hidden[i, :n_units])
            copy_row(seen.cell[k, s], cell[i])
        hidden[n_there:, :n_units] = ZERO
        cell[n_there:] = ZERO
    entry, last = joined_of(shape, room, 0), n_units + shape.n_inputs
    for t in range(n_steps):
        kept, inputs = room.kept[t], entry[t, :, n_units:last]
        for i in range(n_there):
            s = seen.chosen[low + i]
            kept[i] = ZERO if t > 0 and seen.starts[t, s] else ONE
            for j in range(shape.n_inputs):
                inputs[i, j] = seen.x[t, s, j]
        kept[n_there:] = ONE
        inputs[n_there:] = ZERO


@compiled
def copy_row(row, result):  # type: ignore[no-untyped-def]
    wide_vectors()
    arrays_apart()
    for j in range(len(row)):
        result[j] = row[j]


@compiled
def dense_forward(shape, flat, packed, x, outs):  # type: ignore[no-untyped-def]
    """Linear layers with their activations; x: (rows, H)."""
    wide_vectors()
    rows, last = len(x), len(shape.dense) - 1
    for k in range(last + 1):
        out, bias = out_of(shape, outs, rows, k), bias_of(shape, flat, k)
        entry = out_of(shape, outs, rows, k - 1) if k > 0 else x
        apply_weights(entry, turned_of(shape, packed, k), shape.rounded and k < last, out)
        width = out.shape[1]
        for m in range(rows):
            for j in range(width):
                out[m, j] += bias[j]
            if k < last and shape.rectify:
                for j in range(width):
                    out[m, j] = max(out[m, j], ZERO)
            elif k < last:
                for j in range(width):
                    out[m, j] = tanh(out[m, j])


# and back


@compiled
def trunk_backward(shape, back, room, gradient, added):  # type: ignore[no-untyped-def]
    """Add to `gradient` what the last of `room.d_outs` says; the memory's part only if `added`, otherwise it is filled.

    An empty one stays empty; what the gates say is in `room.gates` in any case.
    back: weights as `back_of` finds them; where they are pairs, all products are
    gradient: (P,) the memory's part comes first, turned, [hidden | input | bias] per layer
    """
    n_steps, size, n_units = room.d_hidden.shape
    rows, top = n_steps * size, shape.n_layers - 1
    d_hidden = room.d_hidden.reshape(rows, n_units)
    dense_backward(shape, back, room.hidden[top].reshape(rows, n_units), room, d_hidden, gradient)
    for k in range(top, -1, -1):
        gates, joined = room.gates[k], joined_of(shape, room, k)
        backward_kernel(
            back_of(shape, back, k),
            room.kept,
            room.first[k],
            gates,
            room.cells[k],
            room.squashed[k],
            room.d_hidden,
            room.d_past,
        )
        d_gates, x = gates.reshape(rows, gates.shape[2])[:, : 4 * n_units], joined.reshape(rows, joined.shape[2])
        if gradient.size:
            d_weight = memory_of(shape, gradient, k)
            weigh(x[:, : len(d_weight)], d_gates, d_weight, added, back)
        if k > 0:
            pull_back(d_gates, back_of(shape, back, shape.n_layers + k), d_hidden)


@compiled
def dense_backward(shape, back, x, room, d_x, gradient):  # type: ignore[no-untyped-def]
    """Add to the gradient of weights and biases and fill that of the input, unless one of them is empty."""
    wide_vectors()
    rows, last, learning = len(x), len(shape.dense) - 1, gradient.size > 0
    for k in range(last, -1, -1):
        out, d_out = out_of(shape, room.outs, rows, k), out_of(shape, room.d_outs, rows, k)
        d_bias, width = bias_of(shape, gradient, k), out.shape[1]
        for m in range(rows):
            if k < last and shape.rectify:
                for j in range(width):
                    d_out[m, j] = d_out[m, j] if out[m, j] > ZERO else ZERO
            elif k < last:
                for j in range(width):
                    d_out[m, j] *= ONE - out[m, j] * out[m, j]
            if learning:
                for j in range(width):
                    d_bias[j] += d_out[m, j]
        entry = out_of(shape, room.outs, rows, k - 1) if k > 0 else x
        d_entry = out_of(shape, room.d_outs, rows, k - 1) if k > 0 else d_x
        if learning:
            weigh(d_out, entry, weight_of(shape, gradient, k), True, back)
        if d_entry.size:
            pull_back(d_out, back_of(shape, back, 2 * shape.n_layers + k), d_entry)
