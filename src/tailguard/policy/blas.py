"""Matrix products inside compiled loops: the BLAS that torch brings, called at its address.

A compiled loop that called back into Python for each product would be slower than the product, and would hold the
interpreter's lock.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import get_cython_function_address

from tailguard.loops import compiled, emitted

Array = np.ndarray[Any, np.dtype[Any]]


class Blas(NamedTuple):
    """Where sgemm lies, and room for the arguments it wants by address; not to be shared between threads."""

    sgemm: int
    letters: Array  # N, T
    sizes: Array  # (6,) three extents and three strides
    factors: Array  # 0, 1


def blas() -> Blas:
    """A fresh one, for one call of a kernel."""
    return Blas(
        sgemm_address(), np.frombuffer(b"NT", np.uint8), np.empty(6, np.int32), np.array([0.0, 1.0], np.float32)
    )


@cache
def sgemm_address() -> int:
    """Where a Fortran sgemm lies: the one torch brings where its library shows it, otherwise SciPy's."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = ctypes.cast(ctypes.CDLL(str(library)).sgemm_, ctypes.c_void_p).value
    except (OSError, AttributeError):
        found = None
    return int(found or get_cython_function_address("scipy.linalg.cython_blas", "sgemm"))


@emitted  # type: ignore[untyped-decorator]
def call(typing_context: Any, function: Any, addresses: Any) -> Any:
    """Call a function that takes nothing but addresses and returns nothing."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        arguments = cgutils.unpack_tuple(builder, values[1])  # type: ignore[no-untyped-call]
        kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), arguments)
        return context.get_dummy_value()

    return types.void(types.intp, addresses), generate


@compiled
def product(blas, left, left_turned, right, right_turned, result, added):  # type: ignore[no-untyped-def]
    """result = left @ right, or added to it; an array that is `turned` counts as its transpose.

    left: (M, K), right: (K, N), result: (M, N), each of contiguous rows. Fortran sees every array transposed, so it
    is asked for right' @ left'. With few rows a right factor that is turned costs half as much again.
    """
    sizes = blas.sizes
    sizes[0], sizes[1] = result.shape[1], result.shape[0]
    sizes[2] = left.shape[0] if left_turned else left.shape[1]
    sizes[3], sizes[4], sizes[5] = right.strides[0] // 4, left.strides[0] // 4, result.strides[0] // 4
    at, letter, factor = sizes.ctypes.data, blas.letters.ctypes.data, blas.factors.ctypes.data
    call(
        blas.sgemm,
        (
            letter + np.intp(right_turned),
            letter + np.intp(left_turned),
            at,
            at + 4,
            at + 8,
            factor + 4,
            right.ctypes.data,
            at + 12,
            left.ctypes.data,
            at + 16,
            factor + 4 * np.intp(added),
            result.ctypes.data,
            at + 20,
        ),
    )
