"""Matrix products inside compiled loops, in tiles that stay in registers.

The products of an update are thin: a handful of sequences by the weights. A library made for large products spends its
time there on rearranging; these read both factors where they lie. Every element is one sum in the order of the inner
index, each term a fused multiply-add, so that no bit depends on the machine, on a tile's place, or on other rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from tailguard.loops import compiled, emitted

Array = np.ndarray[Any, np.dtype[Any]]

WIDE = binding.get_host_cpu_features().get("avx512f", False)
VECTOR = 16 if WIDE else 8  # float32 in a register
VECTORS = 2  # side by side in a tile
COLUMNS = VECTOR * VECTORS
HEIGHT = 8 if WIDE else 5  # rows of a tile at most: so many that the machine's registers hold it
PAGE = 4096  # bytes
FLOAT, WHOLE, SLOT = ir.FloatType(), ir.IntType(64), ir.IntType(32)
LANES = ir.VectorType(FLOAT, VECTOR)


class Tile:
    """Emits so many rows of COLUMNS of a product; addresses are whole numbers, strides are in bytes."""

    def __init__(self, builder: Any, n_rows: int) -> None:
        self.builder, self.n_rows = builder, n_rows

    def rows(self, first: Any, apart: Any) -> list[Any]:
        """Their addresses."""
        emit = self.builder
        return [emit.add(first, emit.mul(apart, ir.Constant(WHOLE, i))) for i in range(self.n_rows)]

    def vector_at(self, row: Any, v: int) -> Any:
        """A pointer to the v-th vector of a row."""
        place = self.builder.add(row, ir.Constant(WHOLE, 4 * VECTOR * v))
        return self.builder.inttoptr(place, LANES.as_pointer())

    def load(self, row: Any) -> list[Any]:
        return [self.builder.load(self.vector_at(row, v), align=4) for v in range(VECTORS)]

    def everywhere(self, address: Any) -> Any:
        """One number in all lanes of a vector."""
        emit, nothing = self.builder, ir.Constant(LANES, ir.Undefined)
        number = emit.load(emit.inttoptr(address, FLOAT.as_pointer()), align=4)
        single = emit.insert_element(nothing, number, ir.Constant(SLOT, 0))
        return emit.shuffle_vector(single, nothing, ir.Constant(ir.VectorType(SLOT, VECTOR), [0] * VECTOR))

    def emit(self, left: Any, right: Any, result: Any, depth: Any, added: Any) -> None:
        """left: address, strides of a row and of a column;  right, result: address, stride of a row."""
        emit, zero = self.builder, ir.Constant(WHOLE, 0)
        signature = ir.FunctionType(LANES, [LANES] * 3)
        multiply_add = cgutils.get_or_insert_function(emit.module, signature, f"llvm.fma.v{VECTOR}f32")  # type: ignore[no-untyped-call]
        rows, results = self.rows(*left[:2]), self.rows(*result)
        fetch, loop, done = (emit.append_basic_block(name) for name in ("fetch", "loop", "done"))
        before = emit.basic_block
        emit.cbranch(emit.icmp_signed("!=", added, zero), fetch, loop)
        emit.position_at_end(fetch)
        found = [self.load(row) for row in results]
        emit.branch(loop)

        emit.position_at_end(loop)
        nothing = ir.Constant(LANES, [0.0] * VECTOR)
        k, across, down = (self.either(WHOLE, before, first, fetch, first) for first in (zero, zero, right[0]))
        sums = [[self.either(LANES, before, nothing, fetch, part) for part in row] for row in found]
        factors, new = self.load(down), []
        for row, old in zip(rows, sums, strict=True):
            number = self.everywhere(emit.add(row, across))
            pairs = zip(factors, old, strict=True)
            new.append([emit.call(multiply_add, [number, factor, part]) for factor, part in pairs])
        for moved, step in ((k, ir.Constant(WHOLE, 1)), (across, left[2]), (down, right[1])):
            moved.add_incoming(emit.add(moved, step), loop)
        for old, row in zip(sums, new, strict=True):
            for part, after in zip(old, row, strict=True):
                part.add_incoming(after, loop)
        emit.cbranch(emit.icmp_signed("<", k.incomings[-1][0], depth), loop, done)

        emit.position_at_end(done)
        for place, row in zip(results, new, strict=True):
            for v, part in enumerate(row):
                emit.store(part, self.vector_at(place, v), align=4)

    def either(self, kind: Any, here: Any, value: Any, there: Any, other: Any) -> Any:
        """`value` for those who come from `here`, `other` for those who come from `there`."""
        chosen = self.builder.phi(kind)
        chosen.add_incoming(value, here)
        chosen.add_incoming(other, there)
        return chosen


@emitted  # type: ignore[untyped-decorator]
def fill_tile(typing_context: Any, n_rows: Any, left: Any, right: Any, result: Any, depth: Any, added: Any) -> Any:
    """A tile of 1 to HEIGHT rows: one loop for each number of them."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        places = [cgutils.unpack_tuple(builder, part) for part in values[1:4]]  # type: ignore[no-untyped-call]
        after = builder.append_basic_block("after")
        switch = builder.switch(values[0], after)
        for height in range(1, HEIGHT + 1):
            case = builder.append_basic_block(f"rows{height}")
            switch.add_case(ir.Constant(WHOLE, height), case)
            builder.position_at_end(case)
            Tile(builder, height).emit(*places, *values[4:])
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    whole = types.intp
    pair, triple = (types.UniTuple(whole, n) for n in (2, 3))  # type: ignore[no-untyped-call]
    return types.void(whole, triple, pair, pair, whole, whole), generate


@compiled
def product(left, left_turned, right, result, added):  # type: ignore[no-untyped-def]
    """result = left @ right, or added to it; a left factor that is `turned` counts as its transpose.

    left: (M, K), right: (K, N or more), result: (M, N), each of rows of contiguous numbers. Narrow results cost as much
    as COLUMNS do, and less if the right factor has so many.
    """
    width = result.shape[1]
    whole = width // COLUMNS * COLUMNS
    if whole:
        multiply(left, left_turned, right, result[:, :whole], added)
    if whole < width:
        rest = right[:, whole : whole + COLUMNS] if right.shape[1] >= whole + COLUMNS else padded(right[:, whole:width])
        spare = np.empty((len(result), COLUMNS), np.float32)
        spare[:, : width - whole] = result[:, whole:]
        multiply(left, left_turned, rest, spare, added)
        result[:, whole:] = spare[:, : width - whole]


@compiled
def padded(matrix):  # type: ignore[no-untyped-def]
    """COLUMNS columns, zero beyond the matrix."""
    wider = np.zeros((len(matrix), COLUMNS), np.float32)
    wider[:, : matrix.shape[1]] = matrix
    return wider[:, :]  # of any layout, like a part of a wider one


@compiled
def crowded(right_row, n_tiles):  # type: ignore[no-untyped-def]
    """Whether rows of the right factor push each other out of the cache, and so many tiles read them that a copy pays:
    those a page apart share few places there. Wide tiles take enough of each row not to notice."""
    return not WIDE and right_row % PAGE == 0 and n_tiles >= 8


@compiled
def multiply(left, left_turned, right, result, added):  # type: ignore[no-untyped-def]
    """The same for whole tiles side by side."""
    down, across = left.strides
    if left_turned:
        down, across = across, down
    begin, weights, there = left.ctypes.data, right.ctypes.data, result.ctypes.data
    height, width = result.shape
    depth, right_row, result_row = np.intp(left.shape[0 if left_turned else 1]), right.strides[0], result.strides[0]
    if depth == 0:
        if not added:
            result[:] = np.float32(0.0)
        return
    n_tiles = -(-height // HEIGHT)
    aside = np.empty((depth if crowded(right_row, n_tiles) else 0, COLUMNS), np.float32)
    for j in range(0, width, COLUMNS):
        factor, i = (weights + 4 * j, right_row), 0
        if len(aside):
            aside[:] = right[:, j : j + COLUMNS]
            factor = aside.ctypes.data, 4 * COLUMNS
        for left_over in range(n_tiles, 0, -1):
            n_rows = (height - i) // left_over  # nearly the same for all: none is left with a row or two
            place = there + i * result_row + 4 * j, result_row
            fill_tile(n_rows, (begin + i * down, down, across), factor, place, depth, np.intp(added))
            i += n_rows
