"""The fused kernels against the torch path, their oracle: same numbers, any size, and no word lost in a tail."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler, kernels

MODES = [
    {},
    {"gate": "minmax"},
    {"protect": "noise"},
    {"adaptive_noise": True},
    {"sigma": 0.0, "weight_decay": 0.0},
]


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("ours", [UPGD, AdaptiveUPGD, UPGDW])
def test_fused_and_torch_paths_agree(ours, options):
    """Sizes around the kernels' block of 1,024 and share of 8,192. Noisy steps: agreement after ten is agreement of
    every part."""
    settings = {"lr": 0.01, "sigma": 0.1, "weight_decay": 0.1, **options}
    weights, gates = [], []
    for fused in (True, False):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(size)) for size in (1, 3, 1023, 1024, 1025, 8191, 20_000)]
        optimizer = ours(params, fused=fused, generator=torch.Generator().manual_seed(0), **settings)
        for _ in range(10):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
        weights.append(torch.cat([param.detach() for param in params]))
        gates.append(optimizer.mean_gate)
    assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)
    assert gates[0] == pytest.approx(gates[1], abs=5e-6)


def test_the_gate_polynomial_is_accurate_to_a_millionth():
    x = np.concatenate([np.linspace(-200, 1, 200_001), [-1e30, 0.0, 1.0]]).astype(np.float32)
    gate, total, width = np.empty_like(x), np.zeros_like(x), np.float32(1.0)
    kernels._find_gate(x, np.float32(0.0), width, gate, total)
    exact = 2.0 / (1.0 + np.exp(x.astype(np.float64)))
    np.testing.assert_allclose(gate, exact, rtol=0, atol=1e-6)
    assert gate[-2] == 1.0


def test_an_infinite_width_gives_exactly_the_base_step():
    x = np.array([-1e20, 0.0, 3.0], dtype=np.float32)
    gate, total = np.empty_like(x), np.zeros_like(x)
    kernels._find_gate(x, np.float32(0.0), np.float32(np.inf), gate, total)
    assert (gate == 1.0).all()


@pytest.mark.parametrize("statistic", ["elementwise", "mean", "norm"])
def test_scaler_statistics_do_not_depend_on_the_path_or_the_cut(statistic):
    """Tensors on the fused path, the same in double on the torch path, and one flat tensor with segments."""
    torch.manual_seed(0)
    shapes = [(2, 3), (1025,), (40, 60)]
    sizes = [int(np.prod(shape)) for shape in shapes]
    narrow = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    wide = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    vector = nn.Parameter(torch.zeros(sum(sizes)))
    turned = [nn.Parameter(torch.zeros(shape[::-1]).t() if len(shape) > 1 else torch.zeros(shape)) for shape in shapes]
    scalers = [
        VarianceGradientScaler(narrow, statistic=statistic),
        VarianceGradientScaler(wide, statistic=statistic),
        VarianceGradientScaler([vector], statistic=statistic, segments=sizes),
        VarianceGradientScaler(turned, statistic=statistic),
    ]
    for _ in range(20):
        for i, shape in enumerate(shapes):
            grad = 0.5 * i + torch.randn(shape)
            narrow[i].grad, wide[i].grad, turned[i].grad = grad, grad.double(), grad.clone()
        vector.grad = torch.cat([param.grad.reshape(-1) for param in narrow])
        for scaler in scalers:
            scaler.scale_gradients()
            scaler.step()
    reference = scalers[1].get_tensor_variances()
    for scaler in scalers:
        np.testing.assert_allclose(scaler.get_tensor_variances(), reference, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 1024, kernels.CHUNK - 1, 3 * kernels.CHUNK + 5])
def test_norms_of_stretches_are_those_of_double_precision(size):
    gradient = np.random.default_rng(0).normal(size=size + 7).astype(np.float32)
    cuts, squares = np.array([0, 3, 3, size + 3, size + 7]), np.full(4, np.nan)
    kernels.squared_norms(gradient, cuts[:-1], cuts[1:], squares)
    exact = [np.square(gradient[a:b].astype(np.float64)).sum() for a, b in pairwise(cuts)]
    np.testing.assert_allclose(squares, exact, rtol=1e-6)


def test_a_norm_does_not_hide_what_is_not_finite():
    gradient, squares = np.ones(5000, np.float32), np.zeros(1)
    gradient[4321] = np.nan
    kernels.squared_norms(gradient, np.array([0]), np.array([5000]), squares)
    assert np.isnan(squares[0])
