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

CACHE_LINE = 64


class Blas(NamedTuple):
    """Where sgemm lies, and room for the arguments it wants by address; not to be shared between threads."""

    sgemm: int
    pack: int  # lays out a matrix that many products share; 0 where the library has no such thing
    compute: int  # sgemm with such a matrix
    letters: Array  # N, T, A, P
    sizes: Array  # (6,) three extents and three strides
    factors: Array  # 0, 1


def blas() -> Blas:
    """A fresh one, for one call of a kernel."""
    letters, factors = np.frombuffer(b"NTAP", np.uint8), np.array([0.0, 1.0], np.float32)
    return Blas(sgemm_address(), *packing_addresses(), letters, np.empty(6, np.int32), factors)


@cache
def torch_library() -> ctypes.CDLL | None:
    """The library that torch computes with, where it can be opened."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None


def address_of(name: str) -> int:
    """Where a function of torch's library lies; 0 where it does not show it."""
    function = getattr(torch_library(), name, None)
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0) if function is not None else 0


@cache
def sgemm_address() -> int:
    """Where a Fortran sgemm lies: the one torch brings where its library shows it, otherwise SciPy's."""
    return address_of("sgemm_") or int(get_cython_function_address("scipy.linalg.cython_blas", "sgemm"))


@cache
def packing_addresses() -> tuple[int, int]:
    """Where MKL's functions for packed matrices lie, or twice 0."""
    found = address_of("SGEMM_PACK"), address_of("SGEMM_COMPUTE")
    return found if all(found) and address_of("SGEMM_PACK_GET_SIZE") else (0, 0)


def packed_room(n_outputs: int, n_rows: int, n_inner: int) -> int:
    """How many numbers a packed (n_inner, n_outputs) matrix may take that multiplies n_rows rows.

    MKL asks for megabytes and writes little more than the matrix: memory that is never touched is never taken.
    """
    if not all(packing_addresses()):
        return 0
    size_of = getattr(torch_library(), "SGEMM_PACK_GET_SIZE")  # noqa: B009 (a name in a library of C)
    size_of.restype = ctypes.c_size_t
    n_bytes = size_of(b"A", *(ctypes.byref(ctypes.c_int(n)) for n in (n_outputs, n_rows, n_inner)))
    return -(-int(n_bytes) // CACHE_LINE) * CACHE_LINE // 4


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
    is asked for right' @ left'.
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


@compiled
def pack_right(blas, right, turned, n_rows, packed):  # type: ignore[no-untyped-def]
    """Lay out a right factor for many products with n_rows rows on their left; `turned` as in `product`."""
    if blas.pack == 0:
        return
    sizes = blas.sizes
    n_inner, n_outputs = right.shape
    if turned:
        n_inner, n_outputs = n_outputs, n_inner
    sizes[0], sizes[1], sizes[2], sizes[3] = n_outputs, n_rows, n_inner, right.strides[0] // 4
    at, letter, factor = sizes.ctypes.data, blas.letters.ctypes.data, blas.factors.ctypes.data
    call(
        blas.pack,
        (
            letter + 2,
            letter + np.intp(turned),
            at,
            at + 4,
            at + 8,
            factor + 4,
            right.ctypes.data,
            at + 12,
            packed.ctypes.data,
        ),
    )


@compiled
def packed_product(blas, left, right, turned, packed, result):  # type: ignore[no-untyped-def]
    """result = left @ right, where `packed` holds what `pack_right` made of the same right factor."""
    if blas.compute == 0:
        product(blas, left, False, right, turned, result, False)
        return
    sizes = blas.sizes
    sizes[0], sizes[1], sizes[2] = result.shape[1], result.shape[0], left.shape[1]
    sizes[3], sizes[4], sizes[5] = left.shape[1], left.strides[0] // 4, result.strides[0] // 4
    at, letter = sizes.ctypes.data, blas.letters.ctypes.data
    call(
        blas.compute,
        (
            letter + 3,
            letter,
            at,
            at + 4,
            at + 8,
            packed.ctypes.data,
            at + 12,
            left.ctypes.data,
            at + 16,
            blas.factors.ctypes.data,
            result.ctypes.data,
            at + 20,
        ),
    )
