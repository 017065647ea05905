"""Linear layers in compiled loops are those of torch, there and back."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tailguard.policy.layers import layered


def drawn(*extents: int) -> torch.Tensor:
    return torch.randn(*extents, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("rectify", [False, True])
@pytest.mark.parametrize("widths", [(24, 1), (24, 20, 3), (7, 40, 17, 5)])
@pytest.mark.parametrize("learning", [False, True])
def test_output_and_gradients_are_those_of_torch(widths: tuple[int, ...], rectify: bool, learning: bool) -> None:
    """Of the input always, of the parameters where they learn."""
    torch.manual_seed(0)
    linear = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    between = nn.ReLU() if rectify else nn.Tanh()
    whole = nn.Sequential(*(part for layer in linear[:-1] for part in (layer, between)), linear[-1])
    whole.requires_grad_(learning)
    x = drawn(11, 3, widths[0]).requires_grad_()
    wanted = [x, *(whole.parameters() if learning else ())]
    ours, theirs = layered(linear, rectify, x), whole(x)
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    upstream = drawn(11, 3, widths[-1])
    for found, expected in zip(*(torch.autograd.grad(out, wanted, upstream) for out in (ours, theirs)), strict=True):
        assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_an_input_that_does_not_learn_is_not_asked_for_its_gradient() -> None:
    linear = [nn.Linear(6, 4), nn.Linear(4, 2)]
    layered(linear, False, drawn(5, 6)).sum().backward()  # type: ignore[no-untyped-call]
    assert all(part.weight.grad is not None and part.weight.grad.abs().sum() > 0.0 for part in linear)
