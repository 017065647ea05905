"""A quadratic whose gradient is noise near the optimum: SGD stops at a floor, VGS goes below it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tailguard.optim import VarianceGradientScaler, scaled_step

STEPS, DIMS, RATE = 2_000, 100, 0.5


def descend(enabled: bool, seed: int) -> float:
    """Mean squared distance per dimension, averaged over the last 100 steps."""
    noise = torch.Generator().manual_seed(seed)
    x = nn.Parameter(torch.ones(DIMS))
    optimizer = torch.optim.SGD([x], lr=RATE)
    scaler = VarianceGradientScaler([x], statistic="elementwise", alpha=1.0, enabled=enabled)
    last = []
    for step in range(STEPS):
        x.grad = x.detach() + torch.randn(DIMS, generator=noise)
        factor = scaler.scale_gradients(optimizer)
        scaled_step(optimizer, factor)
        scaler.step()
        if step >= STEPS - 100:
            last.append(float(x.detach().square().mean()))
    return sum(last) / len(last)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_vgs_falls_through_the_noise_floor_of_sgd(seed):
    floor = RATE / (2 - RATE)  # stationary variance of x under x <- (1 - lr) x - lr noise
    assert descend(enabled=False, seed=seed) == pytest.approx(floor, rel=0.1)
    assert descend(enabled=True, seed=seed) < 0.003
