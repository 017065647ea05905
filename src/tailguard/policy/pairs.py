"""Numbers rounded to bfloat16, two in one word: factors of the products that need no more digits.

A bfloat16 is the upper half of a float32: the same range, eight binary digits. Sums of products stay float32. Arrays of
pairs are uint32; the upper half of a word comes second.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from tailguard.loops import compiled, emitted
from tailguard.policy.products import (
    BFLOAT,
    COLUMNS,
    FLOAT,
    SLOT,
    TAKES_PAIRS,
    holds_pairs,
    n_panels_of,
    product,
    product_by_panels,
)

LANES = 16  # words that are made at a time
NOTHING = np.zeros(COLUMNS, np.float32)


def halves_of(builder: Any, address: Any, n: int) -> Any:
    """n numbers, rounded to the nearest, of two to the even one, as whole numbers of 16 bits."""
    numbers, words, halves = (ir.VectorType(kind, n) for kind in (FLOAT, SLOT, ir.IntType(16)))
    found = builder.load(builder.inttoptr(address, numbers.as_pointer()), align=4)
    if TAKES_PAIRS:
        return builder.bitcast(builder.fptrunc(found, ir.VectorType(BFLOAT, n)), halves)
    half, odd, rest, none = (ir.Constant(words, [number] * n) for number in (16, 1, 0x7FFF, 0x7FC0))
    bits = builder.bitcast(found, words)
    near = builder.add(builder.add(bits, rest), builder.and_(builder.lshr(bits, half), odd))
    is_number = builder.fcmp_ordered("ord", found, found)  # rounding could make a number of what is none
    return builder.trunc(builder.select(is_number, builder.lshr(near, half), none), halves)


def emitted_pairs(lanes: int) -> Any:
    """So many words from the numbers at two addresses."""
    by_turns = ir.Constant(ir.VectorType(SLOT, 2 * lanes), [i // 2 + lanes * (i % 2) for i in range(2 * lanes)])

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        lower, upper = (halves_of(builder, address, lanes) for address in values[:2])
        made = builder.shuffle_vector(lower, upper, by_turns)
        builder.store(made, builder.inttoptr(values[2], made.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@emitted  # type: ignore[untyped-decorator]
def make_words(typing_context: Any, lower: Any, upper: Any, words: Any) -> Any:
    return emitted_pairs(LANES)


@emitted  # type: ignore[untyped-decorator]
def make_word(typing_context: Any, lower: Any, upper: Any, word: Any) -> Any:
    return emitted_pairs(1)


@emitted  # type: ignore[untyped-decorator]
def make_halves(typing_context: Any, row: Any, words: Any) -> Any:
    """LANES words from twice as many numbers, one after the other."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        made = halves_of(builder, values[0], 2 * LANES)
        builder.store(made, builder.inttoptr(values[1], made.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@compiled
def fill_pairs(lower, upper, words):  # type: ignore[no-untyped-def]
    """Two rows, element by element."""
    low, high, there, n = lower.ctypes.data, upper.ctypes.data, words.ctypes.data, len(words)
    whole = n - n % LANES
    for j in range(0, whole, LANES):
        make_words(low + 4 * j, high + 4 * j, there + 4 * j)
    for j in range(whole, n):
        make_word(low + 4 * j, high + 4 * j, there + 4 * j)


@compiled
def fill_neighbours(row, words):  # type: ignore[no-untyped-def]
    """A row's elements, two by two."""
    here, there, n = row.ctypes.data, words.ctypes.data, len(words)
    whole = n - n % LANES
    for j in range(0, whole, LANES):
        make_halves(here + 8 * j, there + 4 * j)
    for j in range(whole, n):
        make_word(here + 8 * j, here + 8 * j + 4, there + 4 * j)


@compiled
def paired_columns(matrix):  # type: ignore[no-untyped-def]
    """(M, K) as words (M, K / 2): the left factor of a product; an odd column is paired with zero."""
    height, width = matrix.shape
    n_words = -(-width // 2)
    words = np.empty((height, n_words + LANES), np.uint32)  # apart, so that the cache has places for all rows
    for i in range(height):
        fill_neighbours(matrix[i], words[i, : width // 2])
        if width % 2:
            fill_pairs(matrix[i, width - 1 :], NOTHING, words[i, n_words - 1 : n_words])
    return words[:, :n_words]


@compiled
def paired_rows(matrix):  # type: ignore[no-untyped-def]
    """(K, N) as words (K / 2, N): a left factor that is turned; an odd row is paired with zeros."""
    height, width = matrix.shape
    words = np.empty((-(-height // 2), n_panels_of(width) * COLUMNS), np.uint32)  # rows begin with a line of the cache
    for k in range(height // 2):
        fill_pairs(matrix[2 * k], matrix[2 * k + 1], words[k, :width])
    if height % 2:
        fill_pairs(matrix[height - 1], np.zeros(width, np.float32), words[height // 2, :width])
    return words[:, :width]


@compiled
def paired_panels(matrix, words):  # type: ignore[no-untyped-def]
    """Lay (K, N) out as words in panels (N / COLUMNS or more, K / 2, COLUMNS): the right factor."""
    height, width = matrix.shape
    for p in range(n_panels_of(width)):
        first, last = COLUMNS * p, min(COLUMNS * (p + 1), width)
        if last - first == COLUMNS:
            begin, down, there = matrix.ctypes.data + 4 * first, matrix.strides[0], words[p].ctypes.data
            for k in range(height // 2):
                make_words(begin + 2 * k * down, begin + (2 * k + 1) * down, there + 4 * COLUMNS * k)
        else:
            for k in range(height // 2):
                fill_pairs(matrix[2 * k, first:last], matrix[2 * k + 1, first:last], words[p, k, : last - first])
        if height % 2:
            fill_pairs(matrix[height - 1, first:last], NOTHING, words[p, height // 2, : last - first])


# the two products of a way back


@compiled
def pull_back(d_out, panels, d_in):  # type: ignore[no-untyped-def]
    """The gradient of a layer's input: d_out (M, N) by its weights (N, K), which lie in panels."""
    if holds_pairs(panels):
        product_by_panels(paired_columns(d_out), False, panels, d_in, False)
    else:
        product_by_panels(d_out, False, panels, d_in, False)


@compiled
def weigh(left, right, result, added, like):  # type: ignore[no-untyped-def]
    """The gradient of weights: the transpose of left (R, M) by right (R, N), or added to it; in pairs if `like` is."""
    if holds_pairs(like):
        height, width = right.shape
        panels = np.empty((n_panels_of(width), -(-height // 2), COLUMNS), np.uint32)
        paired_panels(right, panels)
        product_by_panels(paired_rows(left), True, panels, result, added)
    else:
        product(left, True, right, result, added)
