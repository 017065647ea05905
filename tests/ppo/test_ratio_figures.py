"""The figures of the probability ratio, beside the same in torch."""

from __future__ import annotations

from math import isnan

import pytest
import torch

from tailguard.ppo.objective import ratio_figures


@pytest.mark.parametrize("clip_range", [0.05, 0.2, 1.5])
def test_they_are_those_of_the_valid_samples(clip_range: float) -> None:
    random = torch.Generator().manual_seed(0)
    log_ratio = torch.randn(16, 12, generator=random)
    valid = torch.rand(16, 12, generator=random) < 0.7
    outside = (log_ratio.exp() - 1.0).abs() > clip_range
    share, largest = ratio_figures(log_ratio, valid, clip_range)
    assert share == pytest.approx(float(outside[valid].double().mean()))
    assert largest == float(log_ratio[valid].abs().max())


def test_a_ratio_that_is_not_a_number_is_not_hidden_by_others() -> None:
    log_ratio = torch.tensor([0.1, float("nan"), 3.0])
    assert isnan(ratio_figures(log_ratio, torch.ones(3, dtype=torch.bool), 0.2)[1])


def test_nothing_valid_is_nothing_to_see() -> None:
    assert ratio_figures(torch.ones(3), torch.zeros(3, dtype=torch.bool), 0.2) == (0.0, 0.0)
