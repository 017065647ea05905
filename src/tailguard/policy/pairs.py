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


# Loops go by addresses: slices of arrays cost more than what there is to do in them.


@compiled
def fill_pairs(lower, upper, words, n):  # type: ignore[no-untyped-def]
    """n words from the numbers at two addresses, element by element; whole vectors may overlap."""
    if n < LANES:
        for j in range(n):
            make_word(lower + 4 * j, upper + 4 * j, words + 4 * j)
        return
    for j in range(0, n - LANES + 1, LANES):
        make_words(lower + 4 * j, upper + 4 * j, words + 4 * j)
    if n % LANES:
        last = 4 * (n - LANES)
        make_words(lower + last, upper + last, words + last)


@compiled
def fill_neighbours(row, words, n):  # type: ignore[no-untyped-def]
    """n words from the numbers at an address, two by two."""
    if n < LANES:
        for j in range(n):
            make_word(row + 8 * j, row + 8 * j + 4, words + 4 * j)
        return
    for j in range(0, n - LANES + 1, LANES):
        make_halves(row + 8 * j, words + 4 * j)
    if n % LANES:
        make_halves(row + 8 * (n - LANES), words + 4 * (n - LANES))


@compiled
def paired_columns(matrix):  # type: ignore[no-untyped-def]
    """(M, K) as words (M, K / 2): the left factor of a product; an odd column is paired with zero."""
    height, width = matrix.shape
    n_words = -(-width // 2)
    words = np.empty((height, n_words + LANES), np.uint32)  # apart, so that the cache has places for all rows
    here, there = matrix.ctypes.data, words.ctypes.data
    for _ in range(height):
        fill_neighbours(here, there, width // 2)
        if width % 2:
            make_word(here + 4 * (width - 1), NOTHING.ctypes.data, there + 4 * (n_words - 1))
        here, there = here + matrix.strides[0], there + words.strides[0]
    return words[:, :n_words]


@compiled
def paired_rows(matrix):  # type: ignore[no-untyped-def]
    """(K, N) as words (K / 2, N): a left factor that is turned; an odd row is paired with zeros."""
    height, width = matrix.shape
    words = np.empty((-(-height // 2), n_panels_of(width) * COLUMNS), np.uint32)  # rows begin with a line of the cache
    here, down, there = matrix.ctypes.data, matrix.strides[0], words.ctypes.data
    for _ in range(height // 2):
        fill_pairs(here, here + down, there, width)
        here, there = here + 2 * down, there + words.strides[0]
    for j in range(0, width if height % 2 else 0, COLUMNS):
        fill_pairs(here + 4 * j, NOTHING.ctypes.data, there + 4 * j, min(COLUMNS, width - j))
    return words[:, :width]


@compiled
def paired_panels(matrix, words):  # type: ignore[no-untyped-def]
    """Lay (K, N) out as words in panels (N / COLUMNS or more, K / 2, COLUMNS): the right factor."""
    height, width = matrix.shape
    down, there = matrix.strides[0], words.ctypes.data
    for p in range(n_panels_of(width)):
        here, n = matrix.ctypes.data + 4 * COLUMNS * p, min(COLUMNS, width - COLUMNS * p)
        for k in range(height // 2 if n == COLUMNS else 0):
            make_words(here + 2 * k * down, here + (2 * k + 1) * down, there + 4 * COLUMNS * k)
        for k in range(height // 2 if n < COLUMNS else 0):
            fill_pairs(here + 2 * k * down, here + (2 * k + 1) * down, there + 4 * COLUMNS * k, n)
        there += 4 * COLUMNS * (height // 2)
        if height % 2:
            fill_pairs(here + (height - 1) * down, NOTHING.ctypes.data, there, n)
            there += 4 * COLUMNS


@compiled
def words_of(panels):  # type: ignore[no-untyped-def]
    """Where float32 panels (N, K, COLUMNS) lie once they are rounded to pairs of rows: the first half of their room."""
    n_panels, height, _ = panels.shape
    n_words = -(-height // 2)
    room = panels.reshape(panels.size)[: n_panels * n_words * COLUMNS]
    return room.view(np.uint32).reshape(n_panels, n_words, COLUMNS)


@compiled
def round_panels(panels):  # type: ignore[no-untyped-def]
    """Turn float32 panels into pairs of their rows, in place: no word is written before what lies there was read."""
    n_panels, height, _ = panels.shape
    here, there, row = panels.ctypes.data, panels.ctypes.data, 4 * COLUMNS
    for _ in range(n_panels):
        for _ in range(height // 2):
            make_words(here, here + row, there)
            here, there = here + 2 * row, there + row
        if height % 2:
            make_words(here, NOTHING.ctypes.data, there)
            here, there = here + row, there + row


# the product of the way there


@compiled
def apply_weights(x, panels, rounded, result):  # type: ignore[no-untyped-def]
    """result = x (M, K) by weights (K, N) in panels; where these have been `rounded`, x is too."""
    if rounded:
        product_by_panels(paired_columns(x), False, words_of(panels), result, False)
    else:
        product_by_panels(x, False, panels, result, False)


# the two products of the way back


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
