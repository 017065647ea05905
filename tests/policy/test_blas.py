"""Matrix products inside compiled loops, with a right factor as it lies and laid out beforehand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tailguard.policy.blas import blas, pack_right, packed_product, packed_room


def products(n_rows: int, n_inner: int, n_outputs: int, turned: bool, packed: bool) -> tuple[np.ndarray, np.ndarray]:
    """(by the loops, by numpy in double) of random factors; the right one is a slice of a wider array."""
    rng = np.random.default_rng(0)
    left = rng.normal(size=(n_rows, n_inner)).astype(np.float32)
    shape = (n_outputs, n_inner) if turned else (n_inner, n_outputs)
    right = rng.normal(size=(shape[0], shape[1] + 3)).astype(np.float32)[:, : shape[1]]
    room = torch.empty(packed_room(n_outputs, n_rows, n_inner)).numpy()
    result, functions = np.full((n_rows, n_outputs), np.nan, np.float32), blas()
    if not packed:
        functions = functions._replace(pack=0, compute=0)
    pack_right(functions, right, turned, n_rows, room)
    packed_product(functions, left, right, turned, room, result)
    return result, left.astype(np.float64) @ (right.T if turned else right).astype(np.float64)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("n_rows", [1, 5, 16, 64])
@pytest.mark.parametrize("n_inner, n_outputs", [(7, 12), (68, 256), (260, 1024), (1024, 256)])
def test_a_product_is_the_product_however_its_right_factor_is_laid_out(n_inner, n_outputs, n_rows, turned, packed):
    found, exact = products(n_rows, n_inner, n_outputs, turned, packed)
    np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4)


def test_a_product_with_a_laid_out_factor_can_be_repeated_to_the_bit():
    first, again = (products(16, 260, 1024, True, True)[0] for _ in range(2))
    np.testing.assert_array_equal(first, again)
