"""An LSTM layer over whole sequences in compiled loops: one matrix product per step, everything else in one pass.

Episode starts need no trick here: a row that starts an episode reads zeros instead of the last state, and sends no
gradient back. The matrix products are those of the BLAS inside torch, called at its address, because a compiled loop
that called back into Python for each of them would be slower than the product. Sums keep their order, so results do
not depend on the machine's vector width, and the interpreter's lock is not held.

Arrays: L steps, B sequences, H units, K = H + F + 1 columns of [hidden | input | 1] and of their weights.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import get_cython_function_address, intrinsic
from torch import Tensor

compiled: Any = njit(error_model="numpy", cache=True, nogil=True)

ZERO, ONE, TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
LARGEST = np.float32(87.0)  # exp of more overflows float32, and sigmoid is long since 0 or 1
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)  # their sum is ln 2; the first is exact
ROUNDER = np.float32(1.5 * 2**23)  # adding it rounds to a whole number, which then sits in the lowest bits
E0, E1, E2, E3, E4, E5 = (np.float32(1.0 / k) for k in (5040.0, 720.0, 120.0, 24.0, 6.0, 2.0))
BIAS, MANTISSA_BITS = np.int32(127), np.int32(23)
NO_TRANSPOSE, TRANSPOSE = ord("N"), ord("T")


# matrix products


@cache
def sgemm_address() -> int:
    """Where a Fortran sgemm lies: the one torch brings where its library shows it, otherwise SciPy's."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = ctypes.cast(ctypes.CDLL(str(library)).sgemm_, ctypes.c_void_p).value
    except (OSError, AttributeError):
        found = None
    return int(found or get_cython_function_address("scipy.linalg.cython_blas", "sgemm"))


@intrinsic
def call(typing_context: Any, function: Any, addresses: Any) -> Any:
    """Call a function that takes nothing but addresses and returns nothing."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        arguments = cgutils.unpack_tuple(builder, values[1])  # type: ignore[no-untyped-call]
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), arguments)
        return context.get_dummy_value()

    return types.void(types.intp, addresses), generate


@compiled
def multiply(sgemm, letters, sizes, factors, left, right, result):  # type: ignore[no-untyped-def]
    """result = factors[0] * left @ right + factors[1] * result, in Fortran's order; sizes: m n k and three strides."""
    at, size = sizes.ctypes.data, sizes.itemsize
    letter, factor = letters.ctypes.data, factors.ctypes.data
    call(  # type: ignore[call-arg]
        sgemm,
        (
            letter,
            letter + 1,
            at,
            at + size,
            at + 2 * size,
            factor,
            left,
            at + 3 * size,
            right,
            at + 4 * size,
            factor + 4,
            result,
            at + 5 * size,
        ),
    )


# the gates


@compiled
def sigmoid(x):  # type: ignore[no-untyped-def]
    """1 / (1 + exp(-x)) to 1e-7: exp(y) = 2^n exp(r) with a polynomial for |r| <= ln(2)/2 and n put into the bits."""
    y = -x
    y = LARGEST if y > LARGEST else y
    y = -LARGEST if y < -LARGEST else y
    rounded = y * LOG2_E + ROUNDER
    n = rounded - ROUNDER
    r = y - n * LN2_HIGH - n * LN2_LOW
    e = ONE + r * (ONE + r * (E5 + r * (E4 + r * (E3 + r * (E2 + r * (E1 + r * E0))))))
    bits = np.float32(rounded).view(np.int32)
    return ONE / (ONE + e * np.int32((bits + BIAS) << MANTISSA_BITS).view(np.float32))


@compiled
def tanh(x):  # type: ignore[no-untyped-def]
    return TWO * sigmoid(TWO * x) - ONE


# whole sequences


@compiled
def forward_kernel(sgemm, letters, sizes, factors, weight, starts, joined, gates, before, cells, squashed, hidden):  # type: ignore[no-untyped-def]
    """Fill gates, cells, their tanh and the hidden states; `joined` and `before` come with inputs and first state."""
    n_steps, n_sequences, n_units = hidden.shape
    for t in range(n_steps):
        multiply(sgemm, letters, sizes, factors, weight.ctypes.data, joined[t].ctypes.data, gates[t].ctypes.data)
        for b in range(n_sequences):
            for j in range(n_units):
                gates[t, b, 0, j] = sigmoid(gates[t, b, 0, j])
            for j in range(n_units):
                gates[t, b, 1, j] = sigmoid(gates[t, b, 1, j])
            for j in range(n_units):
                gates[t, b, 2, j] = tanh(gates[t, b, 2, j])
            for j in range(n_units):
                gates[t, b, 3, j] = sigmoid(gates[t, b, 3, j])
            for j in range(n_units):
                cells[t, b, j] = gates[t, b, 1, j] * before[t, b, j] + gates[t, b, 0, j] * gates[t, b, 2, j]
            for j in range(n_units):
                squashed[t, b, j] = tanh(cells[t, b, j])
            for j in range(n_units):
                hidden[t, b, j] = gates[t, b, 3, j] * squashed[t, b, j]
            if t + 1 < n_steps:
                kept = ZERO if starts[t + 1, b] else ONE
                for j in range(n_units):
                    before[t + 1, b, j] = kept * cells[t, b, j]
                for j in range(n_units):
                    joined[t + 1, b, j] = kept * hidden[t, b, j]


@compiled
def backward_kernel(sgemm, letters, sizes, factors, weight, starts, gates, before, squashed, d_hidden):  # type: ignore[no-untyped-def]
    """Turn gates into their gradients; `d_hidden` gathers what flows back through time and is overwritten."""
    n_steps, n_sequences, n_units = d_hidden.shape
    d_cell, aside = np.zeros((n_sequences, n_units), np.float32), np.empty((n_sequences, n_units), np.float32)
    for back in range(n_steps):
        t = n_steps - 1 - back
        for b in range(n_sequences):
            for j in range(n_units):
                curve = ONE - squashed[t, b, j] * squashed[t, b, j]
                d_cell[b, j] += d_hidden[t, b, j] * gates[t, b, 3, j] * curve
            for j in range(n_units):
                output = gates[t, b, 3, j]
                gates[t, b, 3, j] = d_hidden[t, b, j] * squashed[t, b, j] * output * (ONE - output)
            for j in range(n_units):
                entry, candidate = gates[t, b, 0, j], gates[t, b, 2, j]
                gates[t, b, 0, j] = d_cell[b, j] * candidate * entry * (ONE - entry)
                gates[t, b, 2, j] = d_cell[b, j] * entry * (ONE - candidate * candidate)
            kept = ZERO if starts[t, b] else ONE  # what came before belongs to another episode
            for j in range(n_units):
                forget = gates[t, b, 1, j]
                gates[t, b, 1, j] = d_cell[b, j] * before[t, b, j] * forget * (ONE - forget)
                d_cell[b, j] *= kept * forget
        if t > 0:
            for b in range(n_sequences):
                if starts[t, b]:
                    aside[b] = d_hidden[t - 1, b]
            multiply(
                sgemm, letters, sizes, factors, weight.ctypes.data, gates[t].ctypes.data, d_hidden[t - 1].ctypes.data
            )
            for b in range(n_sequences):
                if starts[t, b]:
                    d_hidden[t - 1, b] = aside[b]


class LSTMLayer(torch.autograd.Function):
    """(hidden states (L, B, H), cells (L, B, H)); no gradient flows through the cells or into the first state."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, hidden: Tensor, cell: Tensor, w_input: Tensor, w_hidden: Tensor, bias: Tensor, starts: Any
    ) -> tuple[Tensor, Tensor]:
        n_steps, n_sequences = x.shape[:2]
        n_units = w_hidden.shape[1]
        starts = np.ascontiguousarray(starts)
        weight = torch.cat([w_hidden.t(), w_input.t(), bias.unsqueeze(0)])  # (K, 4H)
        joined = torch.empty(n_steps, n_sequences, len(weight))
        joined[0, :, :n_units] = hidden
        joined[:, :, n_units:-1] = x
        joined[:, :, -1] = 1.0
        gates = torch.empty(n_steps, n_sequences, 4, n_units)
        out, before, cells, squashed = (torch.empty(n_steps, n_sequences, n_units) for _ in range(4))
        before[0] = cell
        forward_kernel(
            sgemm_address(),
            np.array([NO_TRANSPOSE, NO_TRANSPOSE], np.uint8),
            np.array([4 * n_units, n_sequences, len(weight), 4 * n_units, len(weight), 4 * n_units], np.int32),
            np.array([1.0, 0.0], np.float32),
            weight.numpy(),
            starts,
            joined.numpy(),
            gates.numpy(),
            before.numpy(),
            cells.numpy(),
            squashed.numpy(),
            out.numpy(),
        )
        ctx.save_for_backward(w_input, w_hidden, joined, gates, before, squashed)
        ctx.starts, ctx.walked = starts, False
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
        w_input, w_hidden, joined, gates, before, squashed = ctx.saved_tensors
        n_sequences, n_units = before.shape[1:]
        backward_kernel(
            sgemm_address(),
            np.array([NO_TRANSPOSE, NO_TRANSPOSE], np.uint8),
            np.array([n_units, n_sequences, 4 * n_units, n_units, 4 * n_units, n_units], np.int32),
            np.array([1.0, 1.0], np.float32),
            w_hidden.detach().numpy(),
            ctx.starts,
            gates.numpy(),
            before.numpy(),
            squashed.numpy(),
            upstream[0].clone(memory_format=torch.contiguous_format).numpy(),
        )
        d_gates = gates.view(-1, 4 * n_units)
        d_input = (d_gates @ w_input).view(*before.shape[:2], -1) if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[3:6]):  # an attack asks for the gradient of its input alone
            return d_input, None, None, None, None, None, None
        d_weight = d_gates.t() @ joined.flatten(0, 1)  # (4H, K)
        return d_input, None, None, d_weight[:, n_units:-1], d_weight[:, :n_units], d_weight[:, -1], None
