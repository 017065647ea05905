"""D3, D4: quantile and categorical losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtri
from torch.testing import assert_close

from tailguard.errors import ConfigError
from tailguard.losses import clip_quantiles, cross_entropy, quantile_huber, two_hot
from tailguard.losses.risk import cell_masses, tail_levels
from tailguard.losses.value import quantile_huber_pairs
from tailguard.policy.critics import CriticConfig, QuantileHead


def fitted_quantiles(kappa: float, n: int = 10) -> torch.Tensor:
    """The minimiser on a fine sample of N(0, 1)."""
    sample = torch.tensor(stats.norm.ppf((np.arange(4000) + 0.5) / 4000), dtype=torch.float64)
    quantiles = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([quantiles], lr=0.5, max_iter=200, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = quantile_huber(quantiles, sample, kappa)
        loss.backward()
        return loss

    optimizer.step(closure)
    return quantiles.detach()


def test_level_tau_learns_the_tau_quantile_and_not_its_mirror() -> None:
    fitted = fitted_quantiles(kappa=0.02)
    expected = stats.norm.ppf((np.arange(10) + 0.5) / 10)
    np.testing.assert_allclose(fitted, expected, atol=0.02)
    assert fitted[0] == pytest.approx(-1.645, abs=0.01)


@pytest.mark.parametrize(("kappa", "minimiser"), [(0.1, -1.601), (1.0, -1.309)])
def test_a_wide_huber_zone_pulls_the_tail_to_the_mean(kappa: float, minimiser: float) -> None:
    assert fitted_quantiles(kappa)[0] == pytest.approx(minimiser, abs=0.01)


def test_quantiles_of_a_uniform_return_are_a_stationary_point() -> None:
    returns = (torch.arange(100) + 0.5) / 100
    quantiles = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9], requires_grad=True)
    quantile_huber(quantiles, returns, kappa=1e-3).backward()
    assert_close(quantiles.grad, torch.zeros(5), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kappa", [0.0, 0.02, 1.0])
@pytest.mark.parametrize("n_targets", [1, 7, 32])
def test_the_kernel_equals_the_definition(kappa: float, n_targets: int) -> None:
    torch.manual_seed(0)
    quantiles, target = torch.randn(6, 5, 32, requires_grad=True), torch.randn(6, 5, n_targets)
    tau = (torch.arange(32) + 0.5) / 32
    upstream = torch.randn(6, 5)
    fast, slow = quantile_huber(quantiles, target, kappa), quantile_huber_pairs(quantiles, target, tau, kappa)
    assert_close(fast, slow, rtol=1e-5, atol=1e-5)
    (fast_gradient,) = torch.autograd.grad(fast, quantiles, upstream)
    (slow_gradient,) = torch.autograd.grad(slow, quantiles, upstream)
    assert_close(fast_gradient, slow_gradient, rtol=1e-5, atol=1e-6)


def test_the_loss_divides_by_kappa_and_averages_over_targets() -> None:
    quantiles, target = torch.tensor([[0.0]], dtype=torch.float64), torch.tensor([[0.05, 2.0]], dtype=torch.float64)
    expected = 0.5 * (0.5 * 0.05**2 / 0.1 + (2.0 - 0.05)) / 2
    assert float(quantile_huber(quantiles, target, kappa=0.1)) == pytest.approx(expected)


def test_per_quantile_clipping_bounds_each_level() -> None:
    old, new = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 1.05])
    assert_close(clip_quantiles(new, old, 0.2, "per_quantile"), torch.tensor([0.2, 1.05]))


def test_mean_only_clipping_shifts_the_law_and_keeps_its_shape() -> None:
    old, new = torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([0.0, 2.0, 4.0])
    clipped = clip_quantiles(new, old, 0.5, "mean_only")
    assert_close(clipped.mean(), torch.tensor(0.5))
    assert_close(clipped.diff(), new.diff())


def test_mean_and_variance_clipping_bounds_both() -> None:
    old, new = torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([0.0, 2.0, 4.0])
    clipped = clip_quantiles(new, old, 0.5, "mean_and_variance")
    assert_close(clipped.mean(), torch.tensor(0.5))
    assert_close(clipped.std() / old.std(), torch.tensor(1.5))


TAIL = tail_levels(8, 0.05)


def law_of(mean: float, std: float) -> torch.Tensor:
    """Normal quantiles on the tail grid."""
    return mean + std * torch.tensor(ndtri(np.array(TAIL)), dtype=torch.float32)


@pytest.mark.parametrize("mode", ["mean_only", "mean_and_variance"])
def test_on_a_tail_grid_the_mean_that_is_clipped_is_that_of_the_law(mode: Any) -> None:
    masses = torch.tensor(cell_masses(TAIL), dtype=torch.float32)
    old = law_of(0.0, 1.0)
    new = old.clone()
    new[:4] -= 2.0  # half of the quantiles, and 5 % of the mass: the mean falls by 0.1
    assert float((new - old) @ masses) == pytest.approx(-0.1, abs=1e-6)
    if mode == "mean_only":
        assert_close(clip_quantiles(new, old, 0.2, mode, TAIL), new)
    far = law_of(0.7, 1.0)
    clipped = clip_quantiles(far, old, 0.2, mode, TAIL)
    assert float((clipped - old) @ masses) == pytest.approx(0.2, abs=1e-6)
    wide = clip_quantiles(law_of(0.0, 3.0), old, 0.2, "mean_and_variance", TAIL)
    assert spread_of(wide, masses) / spread_of(old, masses) == pytest.approx(1.2, rel=1e-5)
    with pytest.raises(ConfigError, match="8 quantiles but 3 levels"):
        clip_quantiles(new, old, 0.2, mode, (0.1, 0.5, 0.9))


def spread_of(law: torch.Tensor, masses: torch.Tensor) -> float:
    return float(((law - law @ masses).square() @ masses).sqrt())


@pytest.mark.parametrize("grid", ["midpoint", "tail"])
def test_a_critic_clips_in_the_mean_that_is_its_value(grid: Any) -> None:
    plain, clipping = (QuantileHead(4, CriticConfig(n_quantiles=8, grid=grid, value_clip=clip)) for clip in (None, 0.2))
    old = torch.tensor(ndtri(np.array(plain.levels)), dtype=torch.float32)[None]
    new, target = old.clone(), torch.linspace(-3.0, 1.0, 16)[None]
    new[:, :4] -= 0.15 / float(plain.masses[:4].sum())  # the value falls by 0.15
    assert_close(clipping.loss(new, target, old), plain.loss(new, target, None))
    new = new - 0.1  # by 0.25: out of range, and away from the target's mean nothing is gained by it
    assert not torch.allclose(clipping.loss(new, target, old), plain.loss(new, target, None), rtol=1e-4)


@pytest.mark.parametrize("mode", ["mean_only", "mean_and_variance", "per_quantile"])
def test_a_single_quantile_is_clipped_as_its_value(mode: Any) -> None:
    old, new = torch.tensor([[0.0]]), torch.tensor([[1.0]], requires_grad=True)
    clipped = clip_quantiles(new, old, 0.2, mode)
    assert_close(clipped.detach(), torch.tensor([[0.2]]))
    clipped.sum().backward()
    assert new.grad is not None
    assert bool(new.grad.isfinite().all())


@pytest.mark.parametrize("mode", ["mean_only", "mean_and_variance", "per_quantile"])
def test_predictions_within_the_range_are_not_clipped(mode: str) -> None:
    old = torch.tensor([-1.0, 0.1, 1.0])
    new = old + 0.01
    assert_close(clip_quantiles(new, old, 0.2, mode), new)  # type: ignore[arg-type]


def test_two_hot_keeps_mass_and_mean_and_sends_outliers_to_the_ends() -> None:
    support = torch.linspace(-2.0, 2.0, 9)
    samples = torch.tensor([[-1.3, 0.2, 1.9], [-9.0, 0.0, 9.0]])
    probabilities = two_hot(samples, support)
    assert_close(probabilities.sum(-1), torch.ones(2))
    assert_close((probabilities @ support)[0], samples[0].mean())
    assert_close(probabilities[1], torch.tensor([1 / 3, 0, 0, 0, 1 / 3, 0, 0, 0, 1 / 3]))


def test_cross_entropy_is_least_at_the_target_itself() -> None:
    target = torch.tensor([[0.2, 0.5, 0.3]])
    logits = target.log().requires_grad_()
    cross_entropy(logits, target).sum().backward()
    assert_close(logits.grad, torch.zeros(1, 3), atol=1e-6, rtol=0)
