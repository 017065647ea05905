"""Optimizers and scaler on the native core against the same in torch: whole runs of steps, any cut into tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler

MODES = [
    {},
    {"gate": "minmax"},
    {"protect": "noise"},
    {"adaptive_noise": True},
    {"sigma": 0.0, "weight_decay": 0.0},
]


@pytest.mark.parametrize("options", MODES, ids=str)
@pytest.mark.parametrize("ours", [UPGD, AdaptiveUPGD, UPGDW])
def test_native_core_and_reference_agree(ours, options):
    """Sizes around the core's lanes of 64 and shares of 8,192. Noisy steps: agreement after ten is agreement of
    every part."""
    settings = {"lr": 0.01, "sigma": 0.1, "weight_decay": 0.1, **options}
    weights, gates = [], []
    for fused in (True, False):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(size)) for size in (1, 3, 63, 64, 65, 8191, 20_000)]
        optimizer = ours(params, fused=fused, generator=torch.Generator().manual_seed(0), **settings)
        for _ in range(10):
            for param in params:
                param.grad = torch.randn_like(param)
            optimizer.step()
        weights.append(torch.cat([param.detach() for param in params]))
        gates.append(optimizer.mean_gate)
    assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)
    assert gates[0] == pytest.approx(gates[1], abs=5e-6)


@pytest.mark.parametrize("ours", [UPGD, AdaptiveUPGD])
def test_a_step_on_several_threads_changes_no_bit(ours):
    weights = []
    for n_threads in (1, 3):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(300_000))
        optimizer = ours([param], generator=torch.Generator().manual_seed(0))
        optimizer.n_threads = n_threads
        for _ in range(3):
            param.grad = torch.randn_like(param)
            optimizer.step()
        weights.append(param.detach())
    assert torch.equal(*weights)


@pytest.mark.parametrize("statistic", ["elementwise", "mean", "norm"])
def test_scaler_statistics_do_not_depend_on_the_path_or_the_cut(statistic):
    """Tensors in the native core, the same in double in torch, and one flat tensor with segments."""
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
