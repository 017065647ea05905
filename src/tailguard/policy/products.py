"""Matrix products inside compiled loops, in tiles that stay in registers.

The products of an update are thin: a handful of sequences by the weights. A library made for large products spends its
time there on rearranging; these read both factors where they lie. Every element is one sum in the order of the inner
index, each term a fused multiply-add, so that no bit depends on the machine, on a tile's place, or on other rows.

A right factor that many products share is laid out in panels of COLUMNS columns, each from its first row to its last
without a gap: memory is then read in the order in which it lies.

Factors may also be pairs of bfloat16, two terms of a sum in one word of 32 bits (policy/pairs.py). Machines with
instructions for them take two terms at a time, twice as fast; elsewhere they are taken one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir  # type: ignore[import-untyped]
from numba import cfunc, types
from numba.core import cgutils

from tailguard.loops import arrays_apart, compiled, emitted, wide_vectors

Array = np.ndarray[Any, np.dtype[Any]]

FEATURES = binding.get_host_cpu_features()
WIDE = FEATURES.get("avx512f", False)
TAKES_PAIRS = WIDE and FEATURES.get("avx512bf16", False)
COLUMNS = 16  # of a tile and of a panel
VECTOR = 16 if WIDE else 8  # float32 in a register
VECTORS = COLUMNS // VECTOR  # in a row of a panel
HEIGHT = 16 if WIDE else 5  # rows of a tile at most: so many that the machine's registers hold it
HEIGHT_ABREAST = 8 if WIDE else 2  # of a tile of two panels side by side, which asks for fewer numbers at a time
TILES, N_NUMBERS = "tailguard_tiles", 13  # the name of a compiled function, and how many numbers it is told
FLOAT, WHOLE, SLOT = ir.FloatType(), ir.IntType(64), ir.IntType(32)
LANES, WORDS = ir.VectorType(FLOAT, VECTOR), ir.VectorType(SLOT, VECTOR)


class BFloat(ir.Type):  # type: ignore[misc]
    """The upper half of a float32, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"


BFLOAT = BFloat()
PAIRS = ir.VectorType(BFLOAT, 2 * VECTOR)


class Tile:
    """Emits so many rows and panels of a product; addresses are whole numbers, strides are in bytes."""

    def __init__(self, builder: Any, n_rows: int, n_panels: int, of_pairs: bool) -> None:
        self.builder, self.n_rows, self.n_panels, self.of_pairs = builder, n_rows, n_panels, of_pairs

    def rows(self, first: Any, apart: Any) -> list[Any]:
        """Their addresses."""
        emit = self.builder
        return [emit.add(first, emit.mul(apart, ir.Constant(WHOLE, i))) for i in range(self.n_rows)]

    def vectors_at(self, row: Any, panel: Any) -> list[Any]:
        """Pointers to all vectors of a row, whose panels lie so far apart."""
        emit = self.builder
        starts = [emit.add(row, emit.mul(panel, ir.Constant(WHOLE, p))) for p in range(self.n_panels)]
        places = [emit.add(start, ir.Constant(WHOLE, 4 * VECTOR * v)) for start in starts for v in range(VECTORS)]
        return [emit.inttoptr(place, LANES.as_pointer()) for place in places]

    def load(self, row: Any, panel: Any) -> list[Any]:
        return [self.builder.load(place, align=4) for place in self.vectors_at(row, panel)]

    def everywhere(self, address: Any) -> Any:
        """One number in all lanes of a vector."""
        emit, nothing = self.builder, ir.Constant(LANES, ir.Undefined)
        number = emit.load(emit.inttoptr(address, FLOAT.as_pointer()), align=4)
        single = emit.insert_element(nothing, number, ir.Constant(SLOT, 0))
        return emit.shuffle_vector(single, nothing, ir.Constant(ir.VectorType(SLOT, VECTOR), [0] * VECTOR))

    def emit(self, left: Any, right: Any, result: Any, depth: Any, added: Any) -> None:
        """left: address, strides of a row and of a column;  right: address, strides of a row and of a panel;
        result: address, stride of a row."""
        emit, zero, beside = self.builder, ir.Constant(WHOLE, 0), ir.Constant(WHOLE, 4 * COLUMNS)
        rows, results = self.rows(*left[:2]), self.rows(*result)
        fetch, loop, done = (emit.append_basic_block(name) for name in ("fetch", "loop", "done"))
        before = emit.basic_block
        emit.cbranch(emit.icmp_signed("!=", added, zero), fetch, loop)
        emit.position_at_end(fetch)
        found = [self.load(row, beside) for row in results]
        emit.branch(loop)

        emit.position_at_end(loop)
        nothing = ir.Constant(LANES, [0.0] * VECTOR)
        k, across, down = (self.either(WHOLE, before, first, fetch, first) for first in (zero, zero, right[0]))
        sums = [[self.either(LANES, before, nothing, fetch, part) for part in row] for row in found]
        factors, new = self.load(down, right[2]), []
        for row, old in zip(rows, sums, strict=True):
            number = self.everywhere(emit.add(row, across))
            pairs = zip(factors, old, strict=True)
            new.append([self.multiply_add(number, factor, part) for factor, part in pairs])
        for moved, step in ((k, ir.Constant(WHOLE, 1)), (across, left[2]), (down, right[1])):
            moved.add_incoming(emit.add(moved, step), loop)
        for old, row in zip(sums, new, strict=True):
            for part, after in zip(old, row, strict=True):
                part.add_incoming(after, loop)
        emit.cbranch(emit.icmp_signed("<", k.incomings[-1][0], depth), loop, done)

        emit.position_at_end(done)
        for place, row in zip(results, new, strict=True):
            for part, vector in zip(row, self.vectors_at(place, beside), strict=True):
                emit.store(part, vector, align=4)

    def multiply_add(self, a: Any, b: Any, total: Any) -> Any:
        """total + a * b; of a pair, the upper one first."""
        if not self.of_pairs:
            return self.call(f"llvm.fma.v{VECTOR}f32", a, b, total)
        if TAKES_PAIRS:
            a, b = (self.builder.bitcast(factor, PAIRS) for factor in (a, b))
            return self.call(f"llvm.x86.avx512bf16.dpbf16ps.{32 * VECTOR}", total, a, b)
        uppers, lowers = zip(self.apart(a), self.apart(b), strict=True)
        for factors in (uppers, lowers):
            total = self.call(f"llvm.fma.v{VECTOR}f32", *factors, total)
        return total

    def apart(self, pairs: Any) -> tuple[Any, Any]:
        """The two numbers of each pair."""
        emit, words = self.builder, self.builder.bitcast(pairs, WORDS)
        upper = emit.and_(words, ir.Constant(WORDS, [0xFFFF0000] * VECTOR))
        lower = emit.shl(words, ir.Constant(WORDS, [16] * VECTOR))
        return emit.bitcast(upper, LANES), emit.bitcast(lower, LANES)

    def call(self, name: str, *values: Any) -> Any:
        signature = ir.FunctionType(LANES, [value.type for value in values])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, signature, name), values)  # type: ignore[no-untyped-call]

    def either(self, kind: Any, here: Any, value: Any, there: Any, other: Any) -> Any:
        """`value` for those who come from `here`, `other` for those who come from `there`."""
        chosen = self.builder.phi(kind)
        chosen.add_incoming(value, here)
        chosen.add_incoming(other, there)
        return chosen


def emitted_tile(most_rows: int, n_panels: int, of_pairs: bool) -> Any:
    """A tile of 1 to so many rows: one loop for each number of them."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        places = [cgutils.unpack_tuple(builder, part) for part in values[1:4]]  # type: ignore[no-untyped-call]
        after = builder.append_basic_block("after")
        switch = builder.switch(values[0], after)
        for height in range(1, most_rows + 1):
            case = builder.append_basic_block(f"rows{height}")
            switch.add_case(ir.Constant(WHOLE, height), case)
            builder.position_at_end(case)
            Tile(builder, height, n_panels, of_pairs).emit(*places, *values[4:])
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    whole = types.intp
    pair, triple = (types.UniTuple(whole, n) for n in (2, 3))  # type: ignore[no-untyped-call]
    return types.void(whole, triple, triple, pair, whole, whole), generate


@emitted  # type: ignore[untyped-decorator]
def fill_tile(typing_context: Any, n_rows: Any, left: Any, right: Any, result: Any, depth: Any, added: Any) -> Any:
    return emitted_tile(HEIGHT, 1, of_pairs=False)


@emitted  # type: ignore[untyped-decorator]
def fill_tile_of_pairs(
    typing_context: Any, n_rows: Any, left: Any, right: Any, result: Any, depth: Any, added: Any
) -> Any:
    return emitted_tile(HEIGHT, 1, of_pairs=True)


@emitted  # type: ignore[untyped-decorator]
def fill_tiles_abreast(
    typing_context: Any, n_rows: Any, left: Any, right: Any, result: Any, depth: Any, added: Any
) -> Any:
    """Two of them, of pairs: there, fetching the left factor is what takes time."""
    return emitted_tile(HEIGHT_ABREAST, 2, of_pairs=True)


@emitted  # type: ignore[untyped-decorator]
def holds_pairs(typing_context: Any, array: Any) -> Any:
    """Whether an array holds pairs of bfloat16: known when a loop is compiled."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return ir.Constant(ir.IntType(1), int(array.dtype == types.uint32))

    return types.boolean(array), generate


@compiled
def product(left, left_turned, right, result, added):  # type: ignore[no-untyped-def]
    """result = left @ right, or added to it; a left factor that is `turned` counts as its transpose.

    left: (M, K), right: (K, N or more), result: (M, N), each of rows of contiguous numbers; factors are both float32 or
    both pairs (uint32). Narrow results cost as much as COLUMNS do, and less if the right factor has so many.
    """
    n_panels = result.shape[1] // COLUMNS
    fill(left, left_turned, (right.ctypes.data, 4 * COLUMNS, right.strides[0]), n_panels, result, added)
    width = COLUMNS * n_panels
    if width < result.shape[1]:
        rest = right[:, width:] if right.shape[1] >= width + COLUMNS else padded(right[:, width : result.shape[1]])
        fill_narrow(left, left_turned, rest, result[:, width:], added)


@compiled
def product_by_panels(left, left_turned, panels, result, added):  # type: ignore[no-untyped-def]
    """The same for a right factor in panels (N / COLUMNS or more, K, COLUMNS), with anything beyond its last column."""
    n_panels = result.shape[1] // COLUMNS
    fill(left, left_turned, (panels.ctypes.data, panels.strides[0], panels.strides[1]), n_panels, result, added)
    if COLUMNS * n_panels < result.shape[1]:
        fill_narrow(left, left_turned, panels[n_panels], result[:, COLUMNS * n_panels :], added)


@compiled
def n_panels_of(width):  # type: ignore[no-untyped-def]
    """As many as cover a width."""
    return -(-width // COLUMNS)


@compiled
def lay_out_panels(matrix, panels):  # type: ignore[no-untyped-def]
    """Copy (K, N) into panels; what lies beyond the last column is left as it is."""
    width = matrix.shape[1]
    for p in range(width // COLUMNS):
        copy_panel(matrix[:, COLUMNS * p :], panels[p])
    if width % COLUMNS:
        panels[-1, :, : width % COLUMNS] = matrix[:, -(width % COLUMNS) :]


@compiled
def copy_panel(matrix, panel):  # type: ignore[no-untyped-def]
    """The first COLUMNS columns."""
    wide_vectors()
    arrays_apart()
    for i in range(len(panel)):
        for j in range(COLUMNS):
            panel[i, j] = matrix[i, j]


@compiled
def padded(matrix):  # type: ignore[no-untyped-def]
    """COLUMNS columns, zero beyond the matrix."""
    wider = np.zeros((len(matrix), COLUMNS), matrix.dtype)
    wider[:, : matrix.shape[1]] = matrix
    return wider[:, :]  # of any layout, like a part of a wider one


@compiled
def fill_narrow(left, left_turned, right, result, added):  # type: ignore[no-untyped-def]
    """A result of less than COLUMNS columns; the right factor has so many."""
    spare = np.empty((len(result), COLUMNS), np.float32)
    spare[:, : result.shape[1]] = result
    fill(left, left_turned, (right.ctypes.data, 0, right.strides[0]), 1, spare, added)
    result[:, :] = spare[:, : result.shape[1]]


@compiled
def fill(left, left_turned, right, n_panels, result, added):  # type: ignore[no-untyped-def]
    """So many panels of a result; of the right factor the address, and the bytes from panel to panel and row to row."""
    down, across = left.strides
    depth = left.shape[1]
    if left_turned:
        down, across, depth = across, down, left.shape[0]
    if depth == 0 and not added:
        result[:, : COLUMNS * n_panels] = np.float32(0.0)
    if depth > 0:
        there, extents = (result.ctypes.data, result.strides[0]), (len(result), n_panels, depth)
        fill_tiles((left.ctypes.data, down, across, *right, *there, *extents, holds_pairs(left), added))


@cfunc(types.void(*[types.intp] * N_NUMBERS), cache=True, error_model="numpy")
def all_tiles(  # type: ignore[no-untyped-def]
    begin, down, across, weights, panel, row, there, result_row, height, n_panels, depth, pairs, added
):
    """The same by addresses: rows, panels, and terms of each sum."""
    p = 0
    while p < n_panels:
        abreast = pairs and p + 1 < n_panels
        n_tiles, i = -(-height // (HEIGHT_ABREAST if abreast else HEIGHT)), 0
        for left_over in range(n_tiles, 0, -1):
            n_rows = (height - i) // left_over  # nearly the same for all: none is left with a row or two
            rows, columns = (begin + i * down, down, across), (weights + p * panel, row, panel)
            place = there + i * result_row + 4 * COLUMNS * p, result_row
            if abreast:
                fill_tiles_abreast(n_rows, rows, columns, place, depth, added)
            elif pairs:
                fill_tile_of_pairs(n_rows, rows, columns, place, depth, added)
            else:
                fill_tile(n_rows, rows, columns, place, depth, added)
            i += n_rows
        p += 2 if abreast else 1


binding.add_symbol(TILES, all_tiles.address)


@emitted  # type: ignore[untyped-decorator]
def fill_tiles(typing_context: Any, numbers: Any) -> Any:
    """Call `all_tiles` by its name. Called as loops call each other, it would be compiled again into each of them."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [WHOLE] * N_NUMBERS)
        function = cgutils.get_or_insert_function(builder.module, kind, TILES)  # type: ignore[no-untyped-call]
        builder.call(function, cgutils.unpack_tuple(builder, values[0]))  # type: ignore[no-untyped-call]
        return context.get_dummy_value()

    return types.void(types.UniTuple(types.intp, N_NUMBERS)), generate  # type: ignore[no-untyped-call]
