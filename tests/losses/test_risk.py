"""F1, F2: CVaR against closed forms."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.integrate import quad
from torch.testing import assert_close

from tailguard.errors import ConfigError
from tailguard.losses import cvar, monotone, quantile_huber, spectral, var, wang
from tailguard.losses.risk import cell_masses, interpolation_weights, midpoint_levels, tail_levels


def exact_cvar(law: object, alpha: float) -> float:
    return quad(law.ppf, 0.0, alpha, limit=500)[0] / alpha  # type: ignore[attr-defined]


def quantiles_of(law: object, n: int) -> torch.Tensor:
    return torch.tensor(law.ppf(np.asarray(midpoint_levels(n))))  # type: ignore[attr-defined]


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.25, 0.9, 1.0])
@pytest.mark.parametrize("n", [2, 21, 32])
def test_cvar_is_exact_for_every_normal_law_at_any_number_of_quantiles(n: int, alpha: float) -> None:
    exact = 3.0 if alpha == 1.0 else 3.0 - 2.0 * stats.norm.pdf(stats.norm.ppf(alpha)) / alpha
    assert float(cvar(quantiles_of(stats.norm(3.0, 2.0), n), alpha)) == pytest.approx(exact, abs=1e-9)


@pytest.mark.parametrize("alpha", [0.05, 0.25, 1.0])
def test_step_rule_on_a_uniform_return_is_half_of_alpha(alpha: float) -> None:
    midpoints = (torch.arange(20, dtype=torch.float64) + 0.5) / 20
    assert_close(cvar(midpoints, alpha, method="step"), torch.tensor(alpha / 2, dtype=torch.float64))


def test_step_rule_counts_the_last_cell_in_part() -> None:
    quantiles = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    assert float(cvar(quantiles, 0.375, method="step")) == pytest.approx((0.25 * 0.0 + 0.125 * 1.0) / 0.375)


@pytest.mark.parametrize("method", ["normal", "step"])
def test_alpha_of_one_is_the_mean(method: str) -> None:
    quantiles = torch.randn(5, 32, dtype=torch.float64).sort(-1).values
    assert_close(cvar(quantiles, 1.0, method=method), quantiles.mean(-1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("law", "bound_at_21"), [(stats.norm(), 0.0005), (stats.laplace(), 0.026), (stats.t(3), 0.111)]
)
def test_discretisation_error_is_bounded_and_falls_with_the_number_of_quantiles(
    law: object, bound_at_21: float
) -> None:
    exact = exact_cvar(law, 0.05)
    errors = [abs(float(cvar(quantiles_of(law, n), 0.05)) / exact - 1.0) for n in (21, 32, 51, 101)]
    steps = [abs(float(cvar(quantiles_of(law, n), 0.05, method="step")) / exact - 1.0) for n in (21, 32, 51, 101)]
    assert errors[0] <= bound_at_21
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(errors))
    assert all(ours < step for ours, step in zip(errors, steps, strict=True))


def test_a_tail_grid_puts_half_its_levels_below_alpha_and_beats_the_midpoints_there() -> None:
    levels = tail_levels(32, 0.05)
    assert sum(level < 0.05 for level in levels) == 16
    assert cell_masses(levels).sum() == pytest.approx(1.0)
    assert (cell_masses(levels) > 0).all()
    law = stats.t(3)
    exact = exact_cvar(law, 0.05)
    tail = float(cvar(torch.tensor(law.ppf(np.asarray(levels))), 0.05, levels=levels))
    midpoint = float(cvar(quantiles_of(law, 32), 0.05))
    assert abs(tail / exact - 1.0) < 0.5 * abs(midpoint / exact - 1.0)


def test_interpolation_reproduces_the_nodes_and_every_normal_quantile() -> None:
    levels = midpoint_levels(9)
    at = np.array([*levels, 0.001, 0.4, 0.999])
    values = stats.norm(1.0, 3.0).ppf(np.asarray(levels)) @ interpolation_weights(levels, at)
    np.testing.assert_allclose(values, stats.norm(1.0, 3.0).ppf(at), atol=1e-9)


@pytest.mark.parametrize("alpha", [0.0, -0.1, 1.5, float("nan")])
def test_an_alpha_that_is_no_share_is_refused(alpha: float) -> None:
    with pytest.raises(ConfigError, match=r"\(0, 1\]"):
        cvar(torch.zeros(4), alpha)


def test_an_unknown_method_and_levels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="normal"):
        cvar(torch.zeros(4), 0.5, method="linear")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="4 quantiles but 3 levels"):
        cvar(torch.zeros(4), 0.5, levels=[0.1, 0.5, 0.9])


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.5, 0.99])
@pytest.mark.parametrize("n", [2, 21, 32])
def test_var_is_the_quantile_of_every_normal_law(n: int, alpha: float) -> None:
    assert float(var(quantiles_of(stats.norm(3.0, 2.0), n), alpha)) == pytest.approx(stats.norm(3.0, 2.0).ppf(alpha))


@pytest.mark.parametrize("levels", [midpoint_levels(32), tail_levels(32, 0.05)], ids=["midpoint", "tail"])
@pytest.mark.parametrize("shift", [-0.5, 0.0, 0.7])
def test_wang_lowers_the_mean_of_a_normal_law_by_its_shift(levels: tuple[float, ...], shift: float) -> None:
    quantiles = torch.tensor(stats.norm(3.0, 2.0).ppf(np.asarray(levels)))
    assert float(wang(quantiles, shift, levels)) == pytest.approx(3.0 - 2.0 * shift, abs=1e-9)


def test_a_spectral_measure_agrees_with_cvar_wang_and_the_mean_where_it_is_one_of_them() -> None:
    law = stats.t(5, loc=1.0)
    quantiles = quantiles_of(law, 51)
    assert float(spectral(quantiles, lambda u: np.minimum(u / 0.1, 1.0))) == pytest.approx(
        float(cvar(quantiles, 0.1)), abs=1e-3
    )
    wangs = spectral(quantiles, lambda u: stats.norm.cdf(stats.norm.ppf(u) + 0.5))
    assert float(wangs) == pytest.approx(float(wang(quantiles, 0.5)), abs=1e-3)
    assert float(spectral(quantiles, lambda u: u)) == pytest.approx(1.0, abs=1e-3)


def test_a_distortion_that_falls_or_does_not_span_the_unit_interval_is_refused() -> None:
    for bad in (lambda u: 1.0 - u, lambda u: 0.5 * u, lambda u: 0.5 + 0.5 * u):
        with pytest.raises(ConfigError, match="rise from 0 at 0 to 1 at 1"):
            spectral(torch.zeros(4), bad)


def test_measures_are_monotone_in_risk_aversion_and_equivariant() -> None:
    quantiles = quantiles_of(stats.skewnorm(-4), 32)
    measures = (lambda q: cvar(q, 0.05), lambda q: var(q, 0.05), lambda q: wang(q, 0.5))
    for measure in measures:
        assert_close(measure(3.0 * quantiles + 2.0), 3.0 * measure(quantiles) + 2.0)
    assert float(cvar(quantiles, 0.05)) < float(var(quantiles, 0.05)) < float(wang(quantiles, 0.5))


def test_sorting_removes_crossings_and_never_raises_the_loss() -> None:
    torch.manual_seed(0)
    crossed, target = torch.randn(200, 16), torch.randn(200, 8)
    ordered = monotone(crossed)
    assert (ordered.diff(dim=-1) >= 0).all()
    before, after = (quantile_huber(q, target, 0.0) for q in (crossed, ordered))
    assert (after <= before + 1e-5).all()
    assert (after < before - 1e-2).any()


def test_bad_arguments_of_the_measures_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\(0, 1\)"):
        var(torch.zeros(4), 1.0)
    with pytest.raises(ConfigError, match="shift"):
        wang(torch.zeros(4), float("nan"))
    with pytest.raises(ConfigError, match="4 quantiles but 2 levels"):
        wang(torch.zeros(4), 0.5, levels=[0.3, 0.7])
