"""Matrix products inside compiled loops."""

from __future__ import annotations

import numpy as np
import pytest

from tailguard.policy.blas import blas, product


@pytest.mark.parametrize("added", [True, False])
@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("n_rows", [1, 5, 16, 64])
@pytest.mark.parametrize("n_inner, n_outputs", [(7, 12), (68, 256), (260, 1024)])
def test_a_product_is_the_product(n_inner, n_outputs, n_rows, turned, added):
    """Factors are slices of wider arrays, as weights inside a layout are."""
    rng = np.random.default_rng(0)

    def factor(height: int, width: int, is_turned: bool) -> tuple[np.ndarray, np.ndarray]:
        shape = (width, height) if is_turned else (height, width)
        held = rng.normal(size=(shape[0], shape[1] + 3)).astype(np.float32)[:, : shape[1]]
        return held, (held.T if is_turned else held).astype(np.float64)

    (left, exact_left), (right, exact_right) = factor(n_rows, n_inner, turned[0]), factor(n_inner, n_outputs, turned[1])
    result = np.ones((n_rows, n_outputs), np.float32)
    product(blas(), left, turned[0], right, turned[1], result, added)
    np.testing.assert_allclose(result, exact_left @ exact_right + float(added), rtol=1e-4, atol=1e-4)
