"""The normal law of numpy arrays against scipy, in the middle and in both tails."""

from __future__ import annotations

import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

from tailguard.losses.normal import normal_cdf, normal_density, normal_quantile


def test_the_normal_law_is_scipys_also_far_out() -> None:
    z = np.linspace(-30.0, 8.0, 1001)[::-1]
    levels = np.concatenate([10.0 ** -np.arange(1.0, 300.0), np.linspace(0.01, 1.0 - 1e-12, 500)])
    assert_allclose(normal_density(z), stats.norm.pdf(z), rtol=1e-12)
    assert_allclose(normal_cdf(z), stats.norm.cdf(z), rtol=1e-12)
    assert_allclose(normal_quantile(levels), stats.norm.ppf(levels), rtol=1e-12, atol=1e-14)


def test_ends_scalars_and_shapes() -> None:
    assert_array_equal(normal_quantile([0.0, 0.5, 1.0]), [-np.inf, 0.0, np.inf])
    assert_array_equal(normal_cdf([-np.inf, 0.0, np.inf]), [0.0, 0.5, 1.0])
    assert_array_equal(normal_density([-np.inf, np.inf]), 0.0)
    assert float(normal_quantile(0.5)) == 0.0
    assert normal_cdf(np.zeros((2, 0, 3))).shape == (2, 0, 3)
