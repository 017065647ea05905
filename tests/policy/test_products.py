"""Matrix products inside compiled loops."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from tailguard.policy.products import COLUMNS, HEIGHT, product


def factors(n_rows: int, n_inner: int, n_outputs: int, turned: bool, spare: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Slices of arrays that are `spare` wider, as weights inside a layout are; a turned left one is its transpose."""
    rng = np.random.default_rng(0)
    shapes = (n_inner, n_rows) if turned else (n_rows, n_inner), (n_inner, n_outputs)
    left, right = (rng.normal(size=(height, width + spare)).astype(np.float32)[:, :width] for height, width in shapes)
    return left, right


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("n_rows", [1, HEIGHT // 2, HEIGHT - 1, 16, 67])
@pytest.mark.parametrize("n_inner, n_outputs", [(1, 1), (7, 12), (68, 256), (260, COLUMNS + 5)])
def test_a_product_is_the_product(n_inner, n_outputs, n_rows, turned, added):
    left, right = factors(n_rows, n_inner, n_outputs, turned)
    result = np.ones((n_rows, n_outputs), np.float32)
    product(left, turned, right, result, added)
    exact = (left.T if turned else left).astype(np.float64) @ right + float(added)
    np.testing.assert_allclose(result, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("n_outputs", [1000, 1024])
def test_rows_that_lie_whole_pages_apart(n_outputs, turned):
    left, right = factors(67, 40, 1024, turned, spare=0)
    result = np.ones((67, n_outputs), np.float32)
    product(left, turned, right, result, True)
    exact = (left.T if turned else left).astype(np.float64) @ right[:, :n_outputs] + 1.0
    np.testing.assert_allclose(result, exact, rtol=1e-4, atol=1e-4)


def test_nothing_beside_the_result_is_touched():
    left, right = factors(5, 7, COLUMNS + 3, turned=False)
    held = np.full((7, COLUMNS + 9), np.float32(-1.0))
    product(left, False, right, held[1:6, 2 : COLUMNS + 5], False)
    held[1:6, 2 : COLUMNS + 5] = -1.0
    assert (held == -1.0).all()


def test_columns_beyond_the_result_are_not_read_into_it():
    """A right factor may be padded up to whole tiles."""
    left, right = factors(6, 9, COLUMNS, turned=False)
    padded, alone = np.empty((6, 4), np.float32), np.empty((6, 4), np.float32)
    product(left, False, right, padded, False)
    product(left, False, right[:, :4], alone, False)
    np.testing.assert_array_equal(padded, alone)


def test_an_empty_sum_is_zero():
    result = np.ones((3, COLUMNS), np.float32)
    product(np.zeros((3, 0), np.float32), False, np.zeros((0, COLUMNS), np.float32), result, True)
    assert (result == 1.0).all()
    product(np.zeros((3, 0), np.float32), False, np.zeros((0, COLUMNS), np.float32), result, False)
    assert (result == 0.0).all()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("before", [None, 3.7])
def test_an_element_is_a_sum_in_order_wherever_it_stands(turned, before):
    """Each term a fused multiply-add: so no bit depends on tiles, on other rows or columns, or on the machine."""
    left, right = factors(2 * HEIGHT + 3, 50, 2 * COLUMNS + 5, turned)
    result = np.full((2 * HEIGHT + 3, 2 * COLUMNS + 5), np.float32(before or 0.0))
    product(left, turned, right, result, before is not None)
    for i, j in [(0, 0), (HEIGHT, COLUMNS - 1), (2 * HEIGHT + 2, 2 * COLUMNS + 4)]:
        row, total = (left[:, i] if turned else left[i]), Fraction(float(np.float32(before or 0.0)))
        for a, b in zip(row, right[:, j], strict=True):
            total = Fraction(rounded(Fraction(float(a)) * Fraction(float(b)) + total))
        assert float(result[i, j]) == total
    alone = np.full((1, 1), np.float32(before or 0.0))
    last = (left[:, -1:] if turned else left[-1:]), right[:, -1:]
    product(last[0], turned, last[1], alone, before is not None)
    assert alone[0, 0] == result[-1, -1]


def rounded(exact: Fraction) -> float:
    """The nearest float32, rounded once; of two, the even one."""
    near = np.float32(float(exact))
    candidates = [np.nextafter(near, np.float32(-np.inf)), near, np.nextafter(near, np.float32(np.inf))]
    return float(min(candidates, key=lambda x: (abs(Fraction(float(x)) - exact), int(x.view(np.int32)) & 1)))
