"""Numbers rounded to bfloat16 in pairs, and products of them."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from tailguard.policy.pairs import (
    apply_weights,
    paired_columns,
    paired_panels,
    paired_rows,
    pull_back,
    round_panels,
    weigh,
    words_of,
)
from tailguard.policy.products import COLUMNS, lay_out_panels, n_panels_of, product, product_by_panels
from tests.policy.test_products import rounded

SIZES = [(1, 1), (2, 3), (7, 16), (16, 33), (33, 47), (40, 64)]
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 3.4e38, 1.00390625, 1.01171875, -1.00390625]  # two lie halfway


def matrix(height: int, width: int, seed: int = 0) -> np.ndarray:
    """A slice of a wider array, with everything in it that is hard to round."""
    found = np.random.default_rng(seed).normal(size=(height, width + 5)).astype(np.float32)[:, :width]
    if found.size >= len(SPECIAL):
        found.flat[: len(SPECIAL)] = SPECIAL  # copies nothing: .flat writes through
    return found


def halves(numbers: np.ndarray) -> np.ndarray:
    """The upper sixteen bits after torch has rounded."""
    return torch.from_numpy(np.ascontiguousarray(numbers)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def in_words(lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    return halves(lower).astype(np.uint32) | (halves(upper).astype(np.uint32) << 16)


def whole(numbers: np.ndarray, axis: int) -> np.ndarray:
    """With zeros added to an odd extent."""
    odd = numbers.shape[axis] % 2
    return np.pad(numbers, [(0, odd if i == axis else 0) for i in range(2)])


def assert_same_words(found: np.ndarray, expected: np.ndarray) -> None:
    """The same bits; of a number that is none, that it is none."""
    assert found.dtype == np.uint32
    for shift in (0, 16):
        one, two = ((words >> shift & 0xFFFF).astype(np.uint32) << 16 for words in (found, expected))
        one, two = one.view(np.float32), two.view(np.float32)
        np.testing.assert_array_equal(np.isnan(one), np.isnan(two))
        np.testing.assert_array_equal(one[~np.isnan(one)].view(np.uint32), two[~np.isnan(two)].view(np.uint32))


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_numbers_are_rounded_as_torch_rounds_them(height: int, width: int) -> None:
    numbers = matrix(height, width)
    columns, rows = whole(numbers, 1), whole(numbers, 0)
    assert_same_words(paired_columns(numbers), in_words(columns[:, ::2], columns[:, 1::2]))
    assert_same_words(paired_rows(numbers), in_words(rows[::2], rows[1::2]))
    panels = np.zeros((n_panels_of(width), len(rows) // 2, COLUMNS), np.uint32)
    paired_panels(numbers, panels)
    flat = panels.swapaxes(0, 1).reshape(len(rows) // 2, -1)
    assert_same_words(flat[:, :width], in_words(rows[::2], rows[1::2]))
    assert not flat[:, width:].any()  # and nothing beside it


def in_halves(numbers: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(numbers)).bfloat16().double().numpy()


@pytest.mark.parametrize(("n_rows", "n_inner", "n_outputs"), [(1, 1, 1), (3, 7, 12), (16, 68, 64), (67, 130, 53)])
def test_the_way_back_multiplies_rounded_factors(n_rows: int, n_inner: int, n_outputs: int) -> None:
    rng = np.random.default_rng(0)
    d_out, weight = (rng.normal(size=size).astype(np.float32) for size in ((n_rows, n_inner), (n_inner, n_outputs)))
    panels = np.zeros((n_panels_of(n_outputs), -(-n_inner // 2), COLUMNS), np.uint32)
    paired_panels(weight, panels)
    d_in = np.empty((n_rows, n_outputs), np.float32)
    pull_back(d_out, panels, d_in)
    np.testing.assert_allclose(d_in, in_halves(d_out) @ in_halves(weight), rtol=1e-4, atol=1e-4)
    result = np.ones((n_inner, n_outputs), np.float32)
    weigh(d_out, d_in, result, True, panels)
    np.testing.assert_allclose(result, 1.0 + in_halves(d_out).T @ in_halves(d_in), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("n_inner", "n_outputs"), [(1, 1), (2, 16), (7, 12), (68, 64), (131, 53)])
def test_panels_are_rounded_where_they_lie(n_inner: int, n_outputs: int) -> None:
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=size).astype(np.float32) for size in ((9, n_inner), (n_inner, n_outputs)))
    panels = np.zeros((n_panels_of(n_outputs), n_inner, COLUMNS), np.float32)
    expected = np.zeros((n_panels_of(n_outputs), -(-n_inner // 2), COLUMNS), np.uint32)
    lay_out_panels(weight, panels)
    paired_panels(weight, expected)
    round_panels(panels)
    np.testing.assert_array_equal(words_of(panels), expected)
    result = np.empty((9, n_outputs), np.float32)
    apply_weights(x, panels, True, result)
    np.testing.assert_allclose(result, in_halves(x) @ in_halves(weight), rtol=1e-4, atol=1e-4)


def test_without_pairs_the_way_back_is_the_plain_product() -> None:
    rng = np.random.default_rng(0)
    d_out, weight = (rng.normal(size=size).astype(np.float32) for size in ((9, 20), (20, 37)))
    panels = np.zeros((n_panels_of(37), 20, COLUMNS), np.float32)
    lay_out_panels(weight, panels)
    d_in, expected = np.empty((9, 37), np.float32), np.empty((9, 37), np.float32)
    pull_back(d_out, panels, d_in)
    product(d_out, False, weight, expected, False)
    np.testing.assert_array_equal(d_in, expected)
    d_weight, turned = np.empty((20, 37), np.float32), np.empty((20, 37), np.float32)
    weigh(d_out, d_in, d_weight, False, panels)
    product(d_out, True, d_in, turned, False)
    np.testing.assert_array_equal(d_weight, turned)


@pytest.mark.parametrize("n_panels", [1, 2, 3])
def test_a_sum_takes_pairs_in_order_and_the_upper_one_first(n_panels: int) -> None:
    """On machines with instructions for it and on others: each term is added and rounded to float32 once."""
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(19, 50)).astype(np.float32), rng.normal(size=(50, 16 * n_panels)).astype(np.float32)
    panels = np.zeros((n_panels, 25, COLUMNS), np.uint32)
    paired_panels(right, panels)
    result = np.empty((19, 16 * n_panels), np.float32)
    product_by_panels(paired_columns(left), False, panels, result, False)
    for i, j in [(0, 0), (8, 15), (18, 16 * n_panels - 1)]:
        a, b, total = in_halves(left[i : i + 1])[0], in_halves(right[:, j : j + 1])[:, 0], Fraction(0)
        for k in range(0, 50, 2):
            for term in (k + 1, k):
                total = Fraction(rounded(Fraction(a[term]) * Fraction(b[term]) + total))
        assert float(result[i, j]) == total


def test_a_product_of_pairs_does_not_hide_what_is_not_finite() -> None:
    left, right = np.ones((4, 6), np.float32), np.ones((6, 5), np.float32)
    left[1, 3], left[2, 2] = np.nan, np.inf
    result = np.empty((4, 5), np.float32)
    product(paired_columns(left), False, paired_rows(right), result, False)
    assert np.isfinite(result).all(1).tolist() == [True, False, False, True]


ELSEWHERE = """
import sys
import numpy as np
from llvmlite import binding
features = binding.get_host_cpu_features()
features.update(dict.fromkeys(sys.argv[2:], False))
binding.get_host_cpu_features = lambda: features
from tests.policy.test_pairs import some_products
np.save(sys.argv[1], some_products())
"""


def some_products() -> np.ndarray:
    rng = np.random.default_rng(0)
    left, right = (rng.normal(size=size).astype(np.float32) for size in ((19, 50), (50, 53)))
    plain, paired = np.empty((19, 53), np.float32), np.empty((19, 53), np.float32)
    product(left, False, right, plain, False)
    product(paired_columns(left), False, paired_rows(right), paired, False)
    return np.stack([plain, paired])


@pytest.mark.parametrize("missing", [["avx512bf16"], ["avx512bf16", "avx512f"]], ids=str)
def test_a_machine_without_these_instructions_finds_the_same_sums(missing: list[str], tmp_path: Path) -> None:
    """Compiled anew, in a process that does not know of them."""
    found = tmp_path / "found.npy"
    apart = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", ELSEWHERE, str(found), *missing], check=True, env=apart)
    np.testing.assert_array_equal(np.load(found), some_products())
