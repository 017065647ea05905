"""The policy loss: clipping, divergence, masked means."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from tailguard.losses import clipped_surrogate, kl_estimate, masked_mean


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient_flows"),
    [(1.5, 1.0, False), (1.5, -1.0, True), (0.5, -1.0, False), (0.5, 1.0, True), (1.1, 1.0, True)],
)
def test_gradient_stops_only_where_the_ratio_already_moved_the_right_way(
    ratio: float, advantage: float, gradient_flows: bool
) -> None:
    log_ratio = torch.tensor(ratio).log().requires_grad_()
    clipped_surrogate(log_ratio, torch.tensor(advantage), 0.2).backward()
    assert log_ratio.grad is not None
    assert (log_ratio.grad.item() != 0.0) is gradient_flows


def test_kl_estimate_is_non_negative_and_unbiased() -> None:
    generator = torch.Generator().manual_seed(0)
    action = torch.randn(200_000, generator=generator, dtype=torch.float64)  # from N(0, 1)
    log_ratio = -0.5 * (action - 0.3) ** 2 + 0.5 * action**2  # to N(0.3, 1): KL = 0.045
    estimate = kl_estimate(log_ratio)
    assert (estimate >= 0).all()
    assert float(estimate.mean()) == pytest.approx(0.045, rel=0.05)
    assert float(estimate.std()) < float((-log_ratio).std())


def test_masked_mean_ignores_invalid_samples_even_when_they_are_not_finite() -> None:
    values = torch.tensor([1.0, float("nan"), 3.0])
    assert_close(masked_mean(values, torch.tensor([True, False, True])), torch.tensor(2.0))
    assert_close(masked_mean(values, torch.zeros(3, dtype=torch.bool)), torch.tensor(0.0))
