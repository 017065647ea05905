"""B4: the compiled LSTM against torch's, which carries the control rows; and its limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tailguard.policy.recurrent import LSTM, GatedMemory, Layout, State

L, B, F = 33, 7, 5


def case(n_layers: int, hidden: int, share: float, seed: int = 0) -> tuple[LSTM, torch.Tensor, Layout, State]:
    torch.manual_seed(seed)
    memory = LSTM(F, hidden, n_layers)
    for bias in memory.bias:
        torch.nn.init.normal_(bias)
    starts = np.random.default_rng(seed).random((L, B)) < share
    state = State(torch.randn(n_layers, B, hidden), torch.randn(n_layers, B, hidden))
    state = state.keep(torch.from_numpy(~starts[0]).float())
    return memory, torch.randn(L, B, F, requires_grad=True), Layout(starts), state


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("n_layers", "hidden"), [(1, 16), (2, 24), (1, 3)])
def test_it_equals_torch_in_values_states_and_every_gradient(n_layers: int, hidden: int, share: float) -> None:
    memory, x, layout, state = case(n_layers, hidden, share)
    weight = torch.randn(L, B, hidden)
    sources = [x, *memory.parameters()]
    ours = memory.unroll(x, layout, state)
    torchs = GatedMemory.unroll(memory, x, layout, state)
    assert_close(ours.features, torchs.features, atol=1e-6, rtol=1e-5)
    assert_close(ours.state.hidden, torchs.state.hidden, atol=1e-6, rtol=1e-5)
    assert_close(ours.state.cell, torchs.state.cell, atol=1e-6, rtol=1e-5)
    gradients = [torch.autograd.grad((found.features * weight).sum(), sources) for found in (ours, torchs)]
    for own, expected in zip(*gradients, strict=True):
        assert_close(own, expected, atol=2e-5, rtol=1e-4)


def test_saturated_gates_and_huge_inputs_stay_finite() -> None:
    memory, x, layout, state = case(1, 16, 0.1)
    large = (x.detach() * 1e6).requires_grad_()
    features = memory.unroll(large, layout, state).features
    gradient = torch.autograd.grad(features.sum(), large)[0]
    assert torch.isfinite(features).all()
    assert torch.isfinite(gradient).all()
    assert float(features.detach().abs().max()) <= 1.0


def test_a_nan_is_not_hidden() -> None:
    memory, x, layout, state = case(1, 16, 0.0)
    broken = x.detach().clone()
    broken[3, 2, 1] = float("nan")
    assert not torch.isfinite(memory.unroll(broken, layout, state).features).all()


def test_the_graph_is_walked_back_once() -> None:
    memory, x, layout, state = case(1, 16, 0.1)
    loss = memory.unroll(x, layout, state).features.sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


def test_double_precision_takes_torchs_path() -> None:
    memory, x, layout, state = case(1, 16, 0.1)
    single = memory.unroll(x, layout, state).features
    memory.double()
    double = memory.unroll(x.double(), layout, State(state.hidden.double(), state.cell.double())).features
    assert double.dtype == torch.float64
    assert_close(double.float(), single, atol=1e-5, rtol=1e-4)
