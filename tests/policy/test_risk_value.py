"""The risk value: compiled loops say what torch says."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tailguard.policy.risk_value import RiskValue
from tailguard.policy.sight import Blinkers


def seen(*extents: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features, observations and periods of so many steps."""
    drawn = torch.Generator().manual_seed(1)
    features, obs, period = (torch.randn(*extents, width, generator=drawn) for width in (24, 5, 2))
    return features, obs, period


@pytest.mark.parametrize("extents", [(549, 2), (512,), (3,), (0,)])
def test_reading_says_what_the_differentiable_form_says(extents: tuple[int, ...]) -> None:
    """Of many steps, few and none, with a column that the critics may not see."""
    torch.manual_seed(0)
    value = RiskValue(24, 5, Blinkers(5, (3,)), 20)
    steps = seen(*extents)
    expected = value(*steps).detach()
    read = value.read(*steps)
    assert read.shape == extents
    torch.testing.assert_close(torch.from_numpy(read), expected, rtol=1e-5, atol=1e-6)


def test_weights_that_the_loops_do_not_know_are_left_to_torch() -> None:
    value, steps = RiskValue(24, 5, torch.nn.Identity(), 8).double(), [part.double() for part in seen(4, 3)]
    read = value.read(*steps)
    torch.testing.assert_close(torch.from_numpy(read), value(*steps).detach(), rtol=0, atol=0)
    assert read.dtype == "float64"
