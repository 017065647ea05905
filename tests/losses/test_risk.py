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
from tailguard.losses import cvar
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
