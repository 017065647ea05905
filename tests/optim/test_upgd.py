"""Single steps of the family against their closed forms, and what the gate guarantees."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD

FAMILY = [UPGD, AdaptiveUPGD, UPGDW]
PATHS = pytest.mark.parametrize("fused", [True, False], ids=["fused", "torch"])


def parameter(values: list[float], grad: list[float], dtype: torch.dtype = torch.float32) -> nn.Parameter:
    param = nn.Parameter(torch.tensor(values, dtype=dtype))
    param.grad = torch.tensor(grad, dtype=dtype)
    return param


def gate(x: float) -> float:
    return 2.0 * (1.0 - 1.0 / (1.0 + math.exp(-x)))


@PATHS
def test_one_upgd_step_is_the_closed_form(fused):
    w = parameter([1.0, -2.0, 0.5], [-0.4, 0.1, 0.2])
    UPGD([w], lr=0.1, sigma=0.0, weight_decay=0.5, fused=fused).step()
    # utilities -g w = 0.4, 0.2, -0.1; after bias correction the first step sees exactly those; the largest is 0.4
    expected = [
        (1 - 0.1 * 0.5) * value - 0.1 * g * gate(u / 0.4)
        for value, g, u in [(1.0, -0.4, 0.4), (-2.0, 0.1, 0.2), (0.5, 0.2, -0.1)]
    ]
    assert_close(w.data, torch.tensor(expected))


@PATHS
def test_one_adaptive_step_is_the_closed_form(fused):
    w = parameter([1.0, -2.0, 0.5], [-0.4, 0.1, 0.2])
    AdaptiveUPGD([w], lr=0.1, sigma=0.0, eps=0.01, weight_decay=0.5, fused=fused).step()
    expected = []
    for value, g, u in [(1.0, -0.4, 0.4), (-2.0, 0.1, 0.2), (0.5, 0.2, -0.1)]:
        decayed = g + 0.5 * value  # the decay enters Adam's gradient, not the utility
        expected.append(value - 0.1 * gate(u / 0.4) * decayed / (abs(decayed) + 0.01))
    assert_close(w.data, torch.tensor(expected))


@PATHS
def test_upgdw_decays_outside_gate_and_moments(fused):
    w = parameter([1.0, -2.0, 0.5], [-0.4, 0.1, 0.2])
    UPGDW([w], lr=0.1, sigma=0.0, eps=0.01, weight_decay=0.5, fused=fused).step()
    expected = [
        (1 - 0.1 * 0.5) * value - 0.1 * gate(u / 0.4) * g / (abs(g) + 0.01)
        for value, g, u in [(1.0, -0.4, 0.4), (-2.0, 0.1, 0.2), (0.5, 0.2, -0.1)]
    ]
    assert_close(w.data, torch.tensor(expected))


@PATHS
def test_the_second_step_averages_utility_with_bias_correction(fused):
    w, beta = parameter([1.0, 1.0], [-1.0, -0.5]), 0.9
    optimizer = UPGD([w], lr=0.0, sigma=0.0, beta_utility=beta, fused=fused)
    optimizer.step()
    w.grad = torch.tensor([-1.0, 2.0])
    optimizer.step()
    average = torch.tensor([0.1 * 0.9 + 0.1, 0.1 * 0.9 * 0.5 - 0.1 * 2.0])
    assert_close(optimizer.state[w]["avg_utility"], average)
    expected = (
        gate(1.0) + gate(float(average[1] / average[0]))
    ) / 2  # the correction is the same for both, so it cancels
    assert optimizer.mean_gate == pytest.approx(expected, abs=1e-6)


@PATHS
@pytest.mark.parametrize(
    "ours, base",
    [
        (UPGD, lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1)),
        (AdaptiveUPGD, lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1)),
        (UPGDW, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1)),
    ],
)
def test_a_weight_of_zero_utility_takes_exactly_the_base_step(ours, base, fused):
    """A constant unit weight keeps the maximum positive; the weights that start at zero have no utility."""
    mine, theirs = (nn.Parameter(torch.zeros(5)) for _ in range(2))
    useful = nn.Parameter(torch.ones(1))
    grad = torch.linspace(-1, 1, 5)
    optimizer, reference = ours([mine, useful], lr=0.01, sigma=0.0, weight_decay=0.1, fused=fused), base([theirs])
    mine.grad, theirs.grad, useful.grad = grad.clone(), grad.clone(), -torch.ones(1)
    optimizer.step()
    reference.step()
    assert_close(mine, theirs, rtol=1e-6, atol=0)


@PATHS
@pytest.mark.parametrize("ours", FAMILY)
def test_the_maximum_is_taken_over_all_parameters_and_groups(ours, fused):
    """One tensor alone would be its own maximum; beside a much more useful one its gate is nearly 1."""
    small, large = parameter([1.0], [-1e-4]), parameter([1.0], [-1.0])
    optimizer = ours([{"params": [small]}, {"params": [large], "lr": 0.01}], sigma=0.0, fused=fused)
    optimizer.step()
    assert optimizer.mean_gate == pytest.approx((gate(1e-4) + gate(1.0)) / 2, abs=1e-6)


@PATHS
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize("mode", ["max", "minmax"])
def test_gates_do_not_depend_on_the_scale_of_the_loss(mode, scale, fused):
    w = parameter([1.0, 1.0, 1.0], [-scale, 0.5 * scale, 0.0])
    optimizer = UPGD([w], lr=0.0, sigma=0.0, gate=mode, fused=fused)
    optimizer.step()
    arguments = [1.0, -0.5, 0.0] if mode == "max" else [1.0, -1.0, -1 / 3]
    assert optimizer.mean_gate == pytest.approx(sum(map(gate, arguments)) / 3, abs=1e-6)


@PATHS
@pytest.mark.parametrize("ours", FAMILY)
def test_without_any_useful_weight_everyone_takes_the_base_step(ours, fused):
    w = parameter([1.0, 1.0], [1.0, 0.5])  # both utilities negative
    optimizer = ours([w], lr=0.1, sigma=0.0, fused=fused)
    optimizer.step()
    assert optimizer.mean_gate == 1.0


@PATHS
@pytest.mark.parametrize("utility", [-3e-7, 0.0, 2.0])
def test_minmax_gates_equal_utilities_at_exactly_one(utility, fused):
    w = nn.Parameter(torch.ones(7))
    w.grad = torch.full((7,), -utility)
    optimizer = UPGD([w], lr=0.1, sigma=0.0, gate="minmax", fused=fused)
    for _ in range(3):
        w.data.fill_(1.0)
        optimizer.step()
        assert optimizer.mean_gate == 1.0


@PATHS
def test_protecting_noise_gates_the_noise_and_not_the_step(fused):
    moved = {}
    for protect in ("weights", "noise"):
        w = parameter([1.0, 1.0], [-1.0, -0.5])
        optimizer = UPGD([w], lr=1.0, sigma=0.5, protect=protect, generator=seeded(3), fused=fused)
        optimizer.step()
        moved[protect] = w.data - 1.0
    gates = torch.tensor([gate(1.0), gate(0.5)])
    noise = -moved["weights"] / gates - torch.tensor([-1.0, -0.5])  # solved from the gated step
    assert_close(moved["noise"], -(torch.tensor([-1.0, -0.5]) + gates * noise))


@pytest.mark.parametrize("ours", FAMILY)
def test_flat_parameters_step_like_the_tensors_they_hold(ours):
    """Noise included: it is read by position in the concatenation of all parameters."""
    torch.manual_seed(0)
    sizes = [(3, 5), (40,), (64, 33)]
    tensors = [nn.Parameter(torch.randn(size)) for size in sizes]
    vector = nn.Parameter(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]))
    one, many = ours([vector], sigma=0.1, generator=seeded(1)), ours(tensors, sigma=0.1, generator=seeded(1))
    for _ in range(5):
        for tensor in tensors:
            tensor.grad = torch.randn_like(tensor)
        vector.grad = torch.cat([tensor.grad.reshape(-1) for tensor in tensors])
        one.step()
        many.step()
    assert_close(vector.data, torch.cat([tensor.detach().reshape(-1) for tensor in tensors]), rtol=1e-6, atol=1e-7)


@PATHS
@pytest.mark.parametrize("ours", FAMILY)
def test_parameters_that_missed_steps_are_corrected_by_their_own_count(ours, fused):
    """The late weight's average is young: corrected, its utility equals the old one's, so both gates are gate(1)."""
    early, late = parameter([1.0], [-1.0]), parameter([1.0], [-1.0])
    late.grad = None
    optimizer = ours([early, late], lr=0.0, sigma=0.0, fused=fused)
    for _ in range(5):
        optimizer.step()
    late.grad = torch.tensor([-1.0])
    optimizer.step()
    assert (optimizer.state[early]["step"], optimizer.state[late]["step"]) == (6, 1)
    assert optimizer.mean_gate == pytest.approx(gate(1.0), abs=1e-6)


@PATHS
@pytest.mark.parametrize("ours", FAMILY)
def test_zero_gradients_decay_the_averages_and_stay_finite(ours, fused):
    w = parameter([1.0, -1.0], [0.3, 0.7])
    optimizer = ours([w], sigma=0.0, fused=fused)
    optimizer.step()
    before = {name: value.clone() for name, value in optimizer.state[w].items() if isinstance(value, Tensor)}
    w.grad = torch.zeros(2)
    for _ in range(3):
        optimizer.step()
    assert torch.isfinite(w).all()
    for name, value in before.items():
        assert (optimizer.state[w][name].abs() < value.abs()).all()


@PATHS
@pytest.mark.parametrize("ours", FAMILY)
def test_only_zero_gradients_from_the_start_move_nothing(ours, fused):
    w = parameter([1.0, -1.0], [0.0, 0.0])
    optimizer = ours([w], sigma=0.0, weight_decay=0.0, fused=fused)
    optimizer.step()
    assert_close(w.data, torch.tensor([1.0, -1.0]), rtol=0, atol=0)
    assert optimizer.mean_gate == 1.0


@PATHS
@pytest.mark.parametrize("ours", FAMILY)
def test_a_billion_steps_are_harmless(ours, fused):
    w = parameter([1.0, -1.0], [0.3, 0.7])
    optimizer = ours([w], fused=fused)
    optimizer.step()
    optimizer.state[w]["step"] = 10**9
    optimizer.step()
    assert optimizer.state[w]["step"] == 10**9 + 1
    assert torch.isfinite(w).all()


@PATHS
@pytest.mark.parametrize("ours", FAMILY)
def test_adaptive_noise_keeps_its_share_of_the_step(ours, fused):
    """The noise is sigma times the root mean square of the direction, at every gradient scale and tensor size."""
    shares = []
    for scale, size in [(1.0, 4_000), (1e-3, 4_000), (1.0, 40_000)]:
        torch.manual_seed(0)
        start = torch.zeros(size)
        grad = scale * torch.randn(size)
        moved = []
        for sigma in (0.0, 0.2):
            w = nn.Parameter(start.clone())
            w.grad = grad.clone()
            ours([w], lr=1.0, sigma=sigma, weight_decay=0.0, adaptive_noise=True, fused=fused).step()
            moved.append(w.data)
        shares.append(float((moved[1] - moved[0]).norm() / moved[0].norm()))
    assert shares == pytest.approx([0.2, 0.2, 0.2], rel=0.05)


def test_fixed_noise_of_upgd_is_in_gradient_units_and_of_the_adaptive_ones_in_step_units():
    for ours, scale, expected in [(UPGD, 10.0, 0.1), (UPGD, 0.1, 0.1), (AdaptiveUPGD, 10.0, 0.1), (UPGDW, 0.1, 0.1)]:
        w = nn.Parameter(torch.zeros(20_000))  # zero weights: zero utility, gate 1
        w.grad = torch.full((20_000,), scale)
        ours([w], lr=1.0, sigma=0.1, generator=seeded(0)).step()
        assert w.std().item() == pytest.approx(expected, rel=0.05)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
