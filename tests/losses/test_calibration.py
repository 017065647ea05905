"""Calibration: what the functions say about forecasts that are right, too narrow, shifted or ignorant."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tailguard.errors import ConfigError
from tailguard.losses.calibration import (
    coverage,
    coverage_error,
    pinball,
    pinball_skill,
    pit,
    pit_histogram,
    realised_cvar,
)
from tailguard.losses.risk import empirical_cvar, midpoint_levels, tail_levels

LEVELS = midpoint_levels(32)
OUTCOMES = stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000)  # N(0, 1), evenly drawn


def forecast(mean: float = 0.0, std: float = 1.0, levels: tuple[float, ...] = LEVELS) -> np.ndarray:
    return np.asarray(stats.norm(mean, std).ppf(np.asarray(levels)))


@pytest.mark.parametrize("levels", [LEVELS, tail_levels(32, 0.05)], ids=["midpoint", "tail"])
def test_a_right_forecast_covers_its_levels_and_its_transform_is_uniform(levels: tuple[float, ...]) -> None:
    quantiles = forecast(levels=levels)
    np.testing.assert_allclose(coverage(quantiles, OUTCOMES), levels, atol=1e-3)
    np.testing.assert_allclose(pit_histogram(quantiles, OUTCOMES, levels), 1.0, atol=0.01)
    np.testing.assert_allclose(np.sort(pit(quantiles, OUTCOMES, levels)), stats.norm.cdf(np.sort(OUTCOMES)), atol=1e-9)


@pytest.mark.parametrize("tolerance", [0.0, 0.02])
def test_the_error_of_a_forecast_is_that_of_its_worst_level(tolerance: float) -> None:
    """A tolerance forgives what lies that near, and nothing that is really wrong."""
    levels, slack = np.asarray(LEVELS), tolerance * stats.norm.pdf(0.0)
    assert coverage_error(forecast(), OUTCOMES, levels, tolerance) == pytest.approx(0.0, abs=1e-3)
    for wrong in (forecast(std=0.5), forecast(std=2.0), forecast(mean=1.0)):
        worst = np.abs(stats.norm.cdf(wrong) - levels).max()
        assert worst - 2.0 * slack - 1e-3 <= coverage_error(wrong, OUTCOMES, levels, tolerance) <= worst + 1e-3


def test_where_one_return_is_all_there_is_a_law_beside_it_by_a_hair_is_no_error() -> None:
    law, nothing_happens = 1e-3 + 1e-3 * forecast(), np.zeros(100)
    assert coverage_error(law, nothing_happens, np.asarray(LEVELS), 0.0) > 0.5
    assert coverage_error(law, nothing_happens, np.asarray(LEVELS), 0.02) == 0.0
    assert coverage_error(law + 0.1, nothing_happens, np.asarray(LEVELS), 0.02) > 0.9


def test_the_histogram_tells_too_narrow_from_too_wide_and_shifted() -> None:
    narrow = pit_histogram(forecast(std=0.5), OUTCOMES, LEVELS)
    wide = pit_histogram(forecast(std=2.0), OUTCOMES, LEVELS)
    shifted = pit_histogram(forecast(mean=1.0), OUTCOMES, LEVELS)
    assert min(narrow[0], narrow[-1]) > 1.5 > narrow[5]
    assert max(wide[0], wide[-1]) < 0.5 < wide[5]
    assert (np.diff(shifted) < 0).all()


def test_predictions_may_differ_per_outcome_and_may_cross() -> None:
    rng = np.random.default_rng(0)
    centre = rng.normal(size=5_000)
    quantiles = centre[:, None] + forecast()
    realised = centre + rng.normal(size=5_000)
    np.testing.assert_allclose(coverage(quantiles, realised), LEVELS, atol=0.02)
    crossed = rng.permuted(quantiles, axis=1)
    np.testing.assert_array_equal(pit(crossed, realised, LEVELS), pit(quantiles, realised, LEVELS))


def test_skill_is_zero_for_the_best_constant_positive_with_knowledge_and_negative_for_a_wrong_forecast() -> None:
    rng = np.random.default_rng(0)
    centre = 2.0 * rng.normal(size=5_000)
    realised = centre + rng.normal(size=5_000)
    constant = np.quantile(realised, LEVELS, method="inverted_cdf")
    np.testing.assert_allclose(pinball_skill(constant, realised, LEVELS), 0.0, atol=1e-12)
    assert (pinball_skill(centre[:, None] + forecast(), realised, LEVELS) > 0.3).all()
    assert (pinball_skill(constant + 1.0, realised, LEVELS) < 0.0).all()


def test_the_true_quantile_has_the_least_pinball_loss() -> None:
    right = pinball(forecast(), OUTCOMES, LEVELS)
    for wrong in (forecast(mean=0.1), forecast(std=1.1)):
        assert (pinball(wrong, OUTCOMES, LEVELS) >= right - 1e-6).all()
        assert pinball(wrong, OUTCOMES, LEVELS).sum() > right.sum() + 1e-2


@pytest.mark.parametrize("alpha", [0.05, 0.25])
def test_realised_cvar_is_the_cvar_at_the_right_threshold_and_less_at_any_other(alpha: float) -> None:
    exact = -stats.norm.pdf(stats.norm.ppf(alpha)) / alpha
    nu = stats.norm.ppf(alpha)
    assert realised_cvar(np.full(len(OUTCOMES), nu), OUTCOMES, alpha) == pytest.approx(exact, abs=1e-3)
    assert empirical_cvar(OUTCOMES, alpha) == pytest.approx(exact, abs=1e-3)
    for wrong in (nu - 0.3, nu + 0.3):
        assert realised_cvar(np.full(len(OUTCOMES), wrong), OUTCOMES, alpha) < exact - 0.01


def test_empirical_cvar_counts_the_last_outcome_in_part_and_one_at_least() -> None:
    assert empirical_cvar(np.array([3.0, 0.0, 1.0, 2.0]), 0.375) == pytest.approx((0.0 + 0.5 * 1.0) / 1.5)
    assert empirical_cvar(np.array([3.0, 0.0, 1.0, 2.0]), 0.01) == 0.0
    assert empirical_cvar(np.array([3.0, 0.0, 1.0, 2.0]), 1.0) == pytest.approx(1.5)


def test_shapes_that_do_not_fit_are_refused() -> None:
    for quantiles, realised in ((np.zeros((3, 4)), np.zeros(2)), (np.zeros(4), np.zeros((2, 2))), (np.zeros(4), [])):
        with pytest.raises(ConfigError, match=r"\(n, Q\)"):
            coverage(quantiles, np.asarray(realised))
    with pytest.raises(ConfigError, match="at least two"):
        pit(np.zeros(1), np.zeros(3), [0.5])
