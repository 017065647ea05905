"""An LSTM layer over whole sequences in compiled loops: one matrix product per step, everything else in one pass.

Episode starts need no trick here: a row that starts an episode reads zeros instead of the last state, and sends no
gradient back. Sums keep their order, so results do not depend on the machine's vector width, and the interpreter's
lock is not held.

Arrays: L steps, B sequences, H units, K = H + F + 1 columns of [hidden | input | 1] and of their weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailguard.loops import arrays_apart, compiled, fused_multiply_add, wide_vectors
from tailguard.policy.pairs import apply_weights, pull_back, weigh
from tailguard.policy.products import COLUMNS, Array, lay_out_panels, n_panels_of

ZERO, ONE, TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
LARGEST = np.float32(87.0)  # exp of more overflows float32, and sigmoid is long since 0 or 1
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # their sum is ln 2; the first is exact
ROUNDER = np.float32(1.5 * 2**23)  # adding it rounds to a whole number, which then sits in the lowest bits
E0, E1, E2, E3, E4, E5 = (np.float32(1.0 / k) for k in (5040.0, 720.0, 120.0, 24.0, 6.0, 2.0))
NO_PAIRS = np.zeros(0, np.float32)
BIAS, MANTISSA_BITS = np.int32(127), np.int32(23)


# the gates


@compiled
def sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-x)) to 1e-7: exp(y) = 2^n exp(r) with a polynomial for |r| <= ln(2)/2 and n put into the bits."""
    y = -x
    y = LARGEST if y > LARGEST else y
    y = -LARGEST if y < -LARGEST else y
    rounded = fused_multiply_add(y, LOG2_E, ROUNDER)
    n = rounded - ROUNDER
    r = fused_multiply_add(n, -LN2_LOW, fused_multiply_add(n, -LN2_HIGH, y))
    e = fused_multiply_add(r, E0, E1)
    e = fused_multiply_add(r, e, E2)
    e = fused_multiply_add(r, e, E3)
    e = fused_multiply_add(r, e, E4)
    e = fused_multiply_add(r, e, E5)
    e = fused_multiply_add(r, e, ONE)
    e = fused_multiply_add(r, e, ONE)
    bits = np.float32(rounded).view(np.int32)
    return ONE / fused_multiply_add(e, np.int32((bits + BIAS) << MANTISSA_BITS).view(np.float32), ONE)


@compiled
def tanh(x):  # type: ignore[no-untyped-def]
    return fused_multiply_add(TWO, sigmoid(TWO * x), -ONE)


@compiled
def remember(gates, kept, past, cells, squashed, hidden):  # type: ignore[no-untyped-def]
    """One step from gate inputs (B, 4H or more) to gates, cells, their tanh and hidden states (B, H), in place.

    past: (B, H) the cells before, of which `kept` (B,) is 0 where an episode starts and 1 elsewhere
    """
    wide_vectors()
    n_sequences, n_units = len(hidden), np.uint64(hidden.shape[1])  # numba need not ask whether a place is negative
    forgets, candidates, outputs = n_units, n_units + n_units, n_units + n_units + n_units
    for b in range(n_sequences):
        keep = kept[b]
        for j in range(candidates):
            gates[b, j] = sigmoid(gates[b, j])
        for j in range(n_units):
            gates[b, candidates + j] = tanh(gates[b, candidates + j])
        for j in range(n_units):
            gates[b, outputs + j] = sigmoid(gates[b, outputs + j])
        for j in range(n_units):
            cells[b, j] = fused_multiply_add(
                gates[b, forgets + j], keep * past[b, j], gates[b, j] * gates[b, candidates + j]
            )
        for j in range(n_units):
            squashed[b, j] = tanh(cells[b, j])
        for j in range(n_units):
            hidden[b, j] = gates[b, outputs + j] * squashed[b, j]


@compiled
def four_of(row, n_units):  # type: ignore[no-untyped-def]
    """The gates of one sequence, each (H,): input, forget, candidate, output."""
    return row[:n_units], row[n_units : 2 * n_units], row[2 * n_units : 3 * n_units], row[3 * n_units : 4 * n_units]


# whole sequences


@compiled
def forward_kernel(weight, rounded, kept, first, joined, gates, cells, squashed, hidden):  # type: ignore[no-untyped-def]
    """Fill gates, cells, their tanh and the hidden states; `joined` comes with the inputs and the first state.

    weight: (K, 4H) in panels, and whether they have been `rounded`
    """
    n_steps, n_columns, n_gates = len(hidden), weight.shape[1], 4 * hidden.shape[2]
    for t in range(n_steps):
        apply_weights(joined[t, :, :n_columns], weight, rounded, gates[t, :, :n_gates])
        remember(gates[t], kept[t], cells[t - 1] if t > 0 else first, cells[t], squashed[t], hidden[t])
        if t + 1 < n_steps:
            hand_on(hidden[t], kept[t + 1], joined[t + 1])


@compiled
def hand_on(hidden, kept, joined):  # type: ignore[no-untyped-def]
    """What the next step reads of the hidden states (B, H), into its first columns."""
    wide_vectors()
    n_sequences, n_units = hidden.shape
    for b in range(n_sequences):
        keep = kept[b]
        for j in range(n_units):
            joined[b, j] = keep * hidden[b, j]


@compiled
def backward_kernel(weight, kept, first, gates, cells, squashed, d_hidden, d_past):  # type: ignore[no-untyped-def]
    """Turn gates into their gradients, from those of the hidden states; d_past (2, B, H) is room.

    weight: (4H, H) of the hidden states, in panels
    """
    n_steps, n_sequences, n_units = d_hidden.shape
    d_cell, back = d_past[0], d_past[1]
    d_past[:] = ZERO
    for t in range(n_steps - 1, -1, -1):
        past, later = cells[t - 1] if t > 0 else first, min(t + 1, n_steps - 1)
        for b in range(n_sequences):
            four, keeps = four_of(gates[t, b], n_units), (kept[t, b], kept[later, b])
            forget_row(four, keeps, past[b], squashed[t, b], d_hidden[t, b], back[b], d_cell[b])
        if t > 0:
            pull_back(gates[t, :, : 4 * n_units], weight, back)


@compiled
def forget_row(gates, keeps, past, squashed, d_hidden, back, d_cell):  # type: ignore[no-untyped-def]
    """The way back through one step of one sequence: gates (4 of (H,)) become their inputs' gradients.

    keeps: of the state before this step, and of the one after it: what came before may be another episode
    back, d_cell: (H,) what the next step says of this one's hidden states and cells; d_cell goes one step back
    """
    wide_vectors()
    arrays_apart()
    entries, forgets, candidates, outputs = gates
    keep, kept_later = keeps
    for j in range(len(d_cell)):
        entry, forget, candidate, output = entries[j], forgets[j], candidates[j], outputs[j]
        squash, d_out = squashed[j], d_hidden[j] + kept_later * back[j]
        d = d_cell[j] + d_out * output * (ONE - squash * squash)
        entries[j] = d * candidate * entry * (ONE - entry)
        forgets[j] = d * (keep * past[j]) * forget * (ONE - forget)
        candidates[j] = d * entry * (ONE - candidate * candidate)
        outputs[j] = d_out * squash * output * (ONE - output)
        d_cell[j] = d * (keep * forget)


class LSTMLayer(torch.autograd.Function):
    """(hidden states (L, B, H), cells (L, B, H)); no gradient flows through the cells or into the first state."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, hidden: Tensor, cell: Tensor, w_input: Tensor, w_hidden: Tensor, bias: Tensor, starts: Any
    ) -> tuple[Tensor, Tensor]:
        n_steps, n_sequences = x.shape[:2]
        n_units = w_hidden.shape[1]
        kept = np.where(starts, ZERO, ONE)
        kept[0] = ONE  # the caller has zeroed the first state where an episode starts
        weight = torch.cat([w_hidden.t(), w_input.t(), bias.unsqueeze(0)])  # (K, 4H)
        joined = torch.empty(n_steps, n_sequences, len(weight))
        joined[0, :, :n_units] = hidden
        joined[:, :, n_units:-1] = x
        joined[:, :, -1] = 1.0
        gates = torch.empty(n_steps, n_sequences, 4 * n_units)
        out, cells, squashed = (torch.empty(n_steps, n_sequences, n_units) for _ in range(3))
        first = cell.contiguous()
        filled = (joined, gates, cells, squashed, out)
        forward_kernel(in_panels(weight), False, kept, first.numpy(), *(array.numpy() for array in filled))
        ctx.save_for_backward(w_input, w_hidden, joined, gates, first, cells, squashed)
        ctx.kept, ctx.walked = kept, False
        ctx.mark_non_differentiable(cells)
        ctx.set_materialize_grads(False)
        return out, cells

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if upstream[0] is None:
            return (None,) * 7
        if ctx.walked:
            raise RuntimeError("The memory's graph can be walked back only once: run the sequences again.")
        ctx.walked = True  # the gates are about to become their gradients
        w_input, w_hidden, joined, gates, first, cells, squashed = ctx.saved_tensors
        n_units = w_hidden.shape[1]
        d_hidden = upstream[0].clone(memory_format=torch.contiguous_format)
        read = (first, gates, cells, squashed, d_hidden, torch.empty(2, *first.shape))
        backward_kernel(in_panels(w_hidden), ctx.kept, *(array.detach().numpy() for array in read))
        d_gates = gates.view(-1, 4 * n_units)
        d_input = torch.empty(*cells.shape[:2], w_input.shape[1]) if ctx.needs_input_grad[0] else None
        if d_input is not None:
            pull_back(d_gates.numpy(), in_panels(w_input), d_input.flatten(0, 1).numpy())
        if not any(ctx.needs_input_grad[3:6]):  # an attack asks for the gradient of its input alone
            return d_input, None, None, None, None, None, None
        d_weight = torch.empty(joined.shape[-1], 4 * n_units)  # (K, 4H)
        weigh(joined.flatten(0, 1).numpy(), d_gates.numpy(), d_weight.numpy(), False, NO_PAIRS)
        return d_input, None, None, d_weight[n_units:-1].t(), d_weight[:n_units].t(), d_weight[-1], None


def in_panels(weight: Tensor) -> Array:
    """(K, N) as the loops read it."""
    height, width = weight.shape
    panels: Array = np.zeros((n_panels_of(width), height, COLUMNS), np.float32)
    lay_out_panels(weight.detach().contiguous().numpy(), panels)
    return panels
