"""What VGS measures, against closed forms, and when its statistics move."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tailguard.errors import ConfigError, StateError
from tailguard.optim import (
    UPGD,
    UPGDW,
    AdaptiveUPGD,
    VarianceGradientScaler,
    VGSConfig,
    is_scale_free,
    scaled_step,
)

STATISTICS = ["elementwise", "mean", "norm"]
statistics = pytest.mark.parametrize("statistic", STATISTICS)


def observing(gradients: Tensor, **settings: object) -> VarianceGradientScaler:
    """A scaler that has seen these gradients, (T, n), on one tensor."""
    param = nn.Parameter(torch.zeros(gradients.shape[1], dtype=gradients.dtype))
    scaler = VarianceGradientScaler([param], **settings)
    for gradient in gradients:
        param.grad = gradient.clone()
        scaler.scale_gradients()
        scaler.step()
    return scaler


@statistics
@pytest.mark.parametrize("pattern", ["constant", "alternating over elements"])
def test_a_gradient_that_does_not_change_has_no_noise(statistic, pattern):
    gradient = torch.full((100,), 0.5)
    if pattern != "constant":
        gradient[1::2] = -0.5
    assert observing(gradient.expand(300, 100), statistic=statistic).get_normalized_variance() < 0.01


def test_noise_that_cancels_in_the_mean_is_seen_element_by_element_only():
    torch.manual_seed(0)
    noise = torch.randn(500, 50)
    gradients = torch.cat([noise, -noise], dim=1)
    assert observing(gradients, statistic="elementwise").get_normalized_variance() > 0.1
    assert observing(gradients, statistic="mean").get_normalized_variance() < 1e-6  # the documented limit of "mean"


@statistics
@pytest.mark.parametrize("mean, sd", [(1.0, 0.3), (-2.0, 0.8), (1e-6, 4e-7), (1e6, 2e5)])
def test_common_noise_gives_its_squared_relative_size(statistic, mean, sd):
    rng = np.random.default_rng(0)
    common = torch.tensor(mean + sd * rng.standard_normal(1_500), dtype=torch.float32)
    scaler = observing(common[:, None].expand(1_500, 64), statistic=statistic, beta=0.998)
    assert scaler.get_normalized_variance() == pytest.approx((sd / mean) ** 2, rel=0.15)


def test_independent_noise_gives_the_ratio_of_summed_variances_to_squared_means():
    """Means and sds differ from element to element: the ratio is of sums, not a mean of ratios."""
    rng = np.random.default_rng(1)
    mean, sd = rng.normal(size=200), rng.uniform(0.1, 2.0, size=200)
    gradients = torch.tensor(mean + sd * rng.standard_normal((3_000, 200)), dtype=torch.float32)
    expected = (sd**2).sum() / (mean**2).sum()
    assert observing(gradients, beta=0.998).get_normalized_variance() == pytest.approx(expected, rel=0.05)


def test_the_variance_is_unbiased_from_the_second_step_on():
    """Mean over many runs of two steps: the sample variance over what the mean of two leaves of it."""
    torch.manual_seed(0)
    gradients = 3.0 + torch.randn(2, 200_000)
    scaler = observing(gradients, beta=0.9)
    first, second = (0.9 * 0.1, 0.1)
    weights = np.array([first, second]) / (first + second)
    overlap = float((weights**2).sum())
    assert scaler.get_normalized_variance() == pytest.approx(1.0 / (9.0 + overlap), rel=0.02)


def test_pure_noise_counts_as_the_size_of_the_window():
    torch.manual_seed(0)
    scaler = observing(torch.randn(1_500, 400), beta=0.98)
    assert scaler.get_normalized_variance() == pytest.approx((1 + 0.98) / (1 - 0.98), rel=0.1)
    assert scaler.get_normalized_variance() <= (1 + 0.98) / (1 - 0.98) * (1 + 1e-6)


def test_tensors_are_combined_by_size():
    torch.manual_seed(0)
    quiet, noisy = nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(100))
    scaler = VarianceGradientScaler([quiet, noisy])
    for _ in range(200):
        quiet.grad, noisy.grad = torch.ones(300), 1.0 + torch.randn(100)
        scaler.scale_gradients()
        scaler.step()
    each = scaler.get_tensor_variances()
    assert each[0] < 1e-4
    assert each[1] == pytest.approx(1.0, rel=0.2)
    assert scaler.get_normalized_variance() == pytest.approx((300 * each[0] + 100 * each[1]) / 400)


def test_a_part_of_a_large_tensor_says_what_the_whole_says():
    """Rows and columns whose signal and noise differ by a factor of ten, and in opposite directions."""
    torch.manual_seed(0)
    for shape in [(240, 60), (256, 64), (64, 256), (512, 128), (1024, 256), (768, 192), (140, 1024), (2100, 64)]:
        columns, rows = torch.logspace(-0.5, 0.5, shape[1]), torch.logspace(-0.5, 0.5, shape[0])[:, None]
        mean, sd = (columns * rows).reshape(-1), (columns.flip(0) * rows).reshape(-1)
        gradients = mean + sd * torch.randn(40, mean.numel())
        scaler = observing(gradients, beta=0.999)
        assert scaler.statistics.mean.numel() < 0.26 * mean.numel()
        exact = float((sd**2).sum() / (mean**2).sum())
        assert scaler.get_normalized_variance() == pytest.approx(exact, rel=0.2)


def test_large_tensors_are_observed_alike_by_the_native_core_and_by_torch():
    torch.manual_seed(1)
    gradients = torch.randn(5, 140_001) + 1.0
    native, torchs = observing(gradients), observing(gradients.double())
    assert native.statistics.mean.shape == torchs.statistics.mean.shape
    torch.testing.assert_close(native.statistics.mean.double(), torchs.statistics.mean, rtol=1e-4, atol=1e-6)
    assert native.get_normalized_variance() == pytest.approx(torchs.get_normalized_variance(), rel=1e-4)


def test_the_moments_of_adam_are_not_used_because_their_window_is_too_short():
    """E[v - m^2] = c Var holds for Adam's moments too, but ten steps cannot tell a ratio of 100 from one of 19."""
    rng = np.random.default_rng(0)
    gradients = torch.tensor(0.1 + rng.standard_normal((4_000, 500)), dtype=torch.float32)  # true ratio 100
    first, second = torch.zeros(500), torch.zeros(500)
    for gradient in gradients:
        first.lerp_(gradient, 0.1)
        second.lerp_(gradient.square(), 0.001)
    kept = 1 - (1 - 0.9) / (1 + 0.9)
    variance = (second / (1 - 0.999**4000) - first.square()) / kept
    from_moments = float(variance.sum() / first.square().sum())
    dedicated = observing(gradients, beta=0.999).get_normalized_variance()
    assert from_moments < 25.0
    assert dedicated == pytest.approx(100.0, rel=0.15)


def test_factor_follows_its_formula_and_clamps():
    torch.manual_seed(0)
    gradients = 1.0 + torch.randn(150, 1_000)
    scaler = observing(gradients, alpha=2.0, warmup_steps=10)
    ratio = scaler.get_normalized_variance()
    assert scaler.get_scaling_factor() == pytest.approx(1.0 / (1.0 + 2.0 * ratio))
    assert observing(gradients, alpha=1e6, warmup_steps=10, min_scaling_factor=0.2).get_scaling_factor() == 0.2
    assert observing(gradients, alpha=0.0, warmup_steps=10).get_scaling_factor() == 1.0


def test_factor_is_exactly_one_in_warmup_and_when_disabled_and_it_still_measures():
    torch.manual_seed(0)
    gradients = torch.randn(50, 100)
    warm, off = observing(gradients, warmup_steps=51), observing(gradients, warmup_steps=0, enabled=False)
    assert warm.get_scaling_factor() == 1.0
    assert off.get_scaling_factor() == 1.0
    assert warm.get_normalized_variance() == off.get_normalized_variance() > 1.0
    assert observing(gradients, warmup_steps=50).get_scaling_factor() < 1.0


def noisy_scaler(param: nn.Parameter, **settings: object) -> VarianceGradientScaler:
    """Past warmup, with a factor well below one."""
    torch.manual_seed(0)
    scaler = VarianceGradientScaler([param], alpha=1.0, warmup_steps=5, **settings)
    for _ in range(20):
        param.grad = torch.randn_like(param)
        scaler.scale_gradients()
        scaler.step()
    return scaler


def test_the_factor_at_a_step_uses_data_before_it():
    param = nn.Parameter(torch.zeros(50))
    scaler = noisy_scaler(param)
    before = scaler.get_scaling_factor()
    param.grad = torch.full((50,), 1e3)  # a step that would change the ratio at once
    raw = param.grad.clone()
    assert scaler.scale_gradients() == before
    torch.testing.assert_close(param.grad, raw * before)
    scaler.step()
    assert scaler.get_scaling_factor() != before


def test_statistics_are_of_raw_gradients_whatever_happens_to_them_afterwards():
    param, other = nn.Parameter(torch.zeros(50)), nn.Parameter(torch.zeros(50))
    plain, clipped = noisy_scaler(param), noisy_scaler(other)
    for _ in range(20):
        param.grad = torch.randn(50)
        other.grad = param.grad.clone()
        plain.scale_gradients()
        plain.step()
        clipped.scale_gradients()
        clip_grad_norm_([other], 1e-3)
        clipped.step()
    assert plain.get_normalized_variance() == clipped.get_normalized_variance()


@statistics
def test_a_step_not_taken_leaves_no_trace(statistic):
    param = nn.Parameter(torch.zeros(50))
    scaler = noisy_scaler(param, statistic=statistic)
    before = copy.deepcopy(scaler.state_dict())
    for bad in (torch.full((50,), 1e3), torch.full((50,), math.nan)):
        param.grad = bad
        scaler.scale_gradients()  # and no step()
        assert_same_state(scaler.state_dict(), before)
    param.grad = torch.ones(50)
    scaler.scale_gradients()
    scaler.step()
    assert scaler.step_count == 21
    assert np.isfinite(scaler.get_normalized_variance())


def test_a_non_finite_gradient_is_never_committed():
    param = nn.Parameter(torch.zeros(50))
    scaler = noisy_scaler(param)
    before = copy.deepcopy(scaler.state_dict())
    param.grad = torch.full((50,), math.inf)
    scaler.scale_gradients()
    scaler.step()
    assert_same_state(scaler.state_dict(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_parameter_without_gradient_keeps_its_own_count(dtype):
    always, sometimes = nn.Parameter(torch.zeros(5, dtype=dtype)), nn.Parameter(torch.zeros(5, dtype=dtype))
    scaler = VarianceGradientScaler([always, sometimes])
    for t in range(6):
        always.grad = torch.full((5,), 1.0 + t % 2, dtype=dtype)
        sometimes.grad = torch.full((5,), 2.0, dtype=dtype) if t % 2 else None
        scaler.scale_gradients()
        scaler.step()
    assert scaler.state_dict()["statistics"]["counts"].tolist() == [6, 3]
    assert scaler.get_tensor_variances()[1] == pytest.approx(0.0, abs=1e-6)
    assert scaler.get_tensor_variances()[0] > 0.05


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "UPGD": lambda p: UPGD(p, lr=0.1, sigma=0.05, adaptive_noise=True, generator=torch.Generator().manual_seed(0)),
    "AdaptiveUPGD": lambda p: AdaptiveUPGD(p, lr=0.1, sigma=0.05, generator=torch.Generator().manual_seed(0)),
    "UPGDW": lambda p: UPGDW(p, lr=0.1, sigma=0.05, weight_decay=0.5, generator=torch.Generator().manual_seed(0)),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_factor_of_one_half_halves_the_displacement(name):
    """The whole chain, with a scaler whose factor is clamped to exactly 0.5."""
    moved = []
    for floor in (1.0, 0.5):
        torch.manual_seed(1)
        param = nn.Parameter(torch.randn(50))
        scaler = noisy_scaler(param, min_scaling_factor=floor)
        optimizer = OPTIMIZERS[name]([param])
        # moments past their first step, where Adam is a sign; on UPGD's first step the factor cancels in the gate
        for _ in range(0 if name == "UPGD" else 3):
            param.grad = torch.randn(50, generator=torch.Generator().manual_seed(2))
            optimizer.step()
        before = param.detach().clone()
        param.grad = torch.randn(50, generator=torch.Generator().manual_seed(3))
        factor = scaler.scale_gradients(optimizer)
        assert factor == floor
        clip_grad_norm_([param], 1e6)
        scaled_step(optimizer, factor)
        scaler.step()
        assert optimizer.param_groups[0]["lr"] == 0.1
        moved.append(param.detach() - before)
    torch.testing.assert_close(moved[1], moved[0] / 2, rtol=1e-5, atol=1e-6)


def test_a_gradient_factor_would_cancel_inside_adam():
    """Why the factor goes on the step: the same halving on the gradient changes nothing."""
    moved = []
    for factor in (1.0, 0.5):
        param = nn.Parameter(torch.ones(10))
        optimizer = torch.optim.Adam([param], lr=0.1)
        for _ in range(5):
            param.grad = torch.linspace(-1, 1, 10) * factor
            optimizer.step()
        moved.append(param.detach() - 1.0)
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-4, atol=1e-6)


def test_the_rate_is_restored_even_when_the_step_fails():
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([param], lr=0.1)

    def fail() -> float:
        raise RuntimeError("closure")

    with pytest.raises(RuntimeError, match="closure"):
        scaled_step(optimizer, 0.5, fail)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_an_unknown_optimizer_must_say_whether_it_is_scale_free():
    optimizer = torch.optim.LBFGS([nn.Parameter(torch.ones(2))])
    with pytest.raises(ConfigError, match="scale_free"):
        is_scale_free(optimizer)
    optimizer.scale_free = False
    assert not is_scale_free(optimizer)


@pytest.mark.parametrize(
    "make, warns",
    [
        (lambda p: UPGD(p, sigma=0.01), True),
        (lambda p: UPGD(p, sigma=1e-4), False),
        (lambda p: UPGD(p, sigma=0.01, adaptive_noise=True), False),
        (lambda p: AdaptiveUPGD(p, sigma=0.01), False),
    ],
)
def test_fixed_noise_beside_scaled_gradients_warns_once_with_sigma_and_advice(make, warns, recwarn):
    param = nn.Parameter(torch.zeros(5))
    scaler, optimizer = VarianceGradientScaler([param]), make([param])
    param.grad = torch.ones(5)
    scaler.scale_gradients(optimizer)
    scaler.scale_gradients(optimizer)
    messages = [str(warning.message) for warning in recwarn]
    assert len(messages) == int(warns)
    if warns:
        assert "sigma=0.01" in messages[0]
        assert "adaptive_noise=True" in messages[0]


def test_a_scaler_that_only_measures_does_not_warn_about_noise(recwarn):
    param = nn.Parameter(torch.zeros(5))
    param.grad = torch.ones(5)
    VarianceGradientScaler([param], enabled=False).scale_gradients(UPGD([param], sigma=0.01))
    assert not list(recwarn)


@statistics
def test_a_loaded_scaler_continues_bit_for_bit(statistic):
    param, other = nn.Parameter(torch.zeros(50)), nn.Parameter(torch.zeros(50))
    scaler = noisy_scaler(param, statistic=statistic)
    twin = VarianceGradientScaler([other], alpha=1.0, warmup_steps=5, statistic=statistic)
    twin.load_state_dict(scaler.state_dict())
    for _ in range(5):
        param.grad = torch.randn(50)
        other.grad = param.grad.clone()
        assert scaler.scale_gradients() == twin.scale_gradients() < 1.0
        scaler.step()
        twin.step()
    assert_same_state(scaler.state_dict(), twin.state_dict())


def assert_same_state(a: dict[str, object], b: dict[str, object]) -> None:
    assert set(a) == set(b)
    for key, value in a.items():
        if isinstance(value, dict):
            assert_same_state(value, b[key])
        elif isinstance(value, Tensor):
            assert torch.equal(value, b[key])
        else:
            assert value == b[key]


def test_state_of_separate_tensors_fits_a_flat_parameter_with_segments():
    tensors = [nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5))]
    vector = nn.Parameter(torch.zeros(17))
    scaler = VarianceGradientScaler(tensors)
    for _ in range(4):
        for tensor in tensors:
            tensor.grad = torch.randn_like(tensor)
        scaler.scale_gradients()
        scaler.step()
    twin = VarianceGradientScaler([vector], segments=[12, 5])
    twin.load_state_dict(scaler.state_dict())
    assert twin.get_normalized_variance() == scaler.get_normalized_variance()


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda state: state.update(version=0), "version 0"),
        (lambda state: state.pop("version"), "version 0"),
        (lambda state: state["config"].update(statistic="norm"), "measures 'norm'"),
        (lambda state: state["statistics"].update(sizes=[49]), "other sizes"),
    ],
)
def test_a_state_that_cannot_be_used_resets_everything_and_says_why(change, reason):
    param = nn.Parameter(torch.zeros(50))
    scaler = noisy_scaler(param)
    state = copy.deepcopy(scaler.state_dict())
    change(state)
    with pytest.warns(UserWarning, match=reason):
        scaler.load_state_dict(state)
    assert scaler.step_count == 0
    assert scaler.get_scaling_factor() == 1.0
    assert scaler.state_dict()["statistics"]["counts"].tolist() == [0]


def test_a_newer_or_incomplete_state_is_refused_and_changes_nothing():
    scaler = noisy_scaler(nn.Parameter(torch.zeros(50)))
    state = scaler.state_dict()
    with pytest.raises(StateError, match="update tailguard"):
        scaler.load_state_dict({**state, "version": 99})
    with pytest.raises(StateError, match="step_count"):
        scaler.load_state_dict({key: state[key] for key in state if key != "step_count"})
    assert_same_state(scaler.state_dict(), state)


def test_state_holds_version_configuration_counts_and_statistics_only():
    state = noisy_scaler(nn.Parameter(torch.zeros(50))).state_dict()
    assert set(state) == {"version", "config", "step_count", "statistics"}
    assert set(state["config"]) == set(VGSConfig.model_fields)
    assert set(state["statistics"]) == {"sizes", "counts", "power", "signal", "mean"}


def test_new_parameters_keep_statistics_of_the_same_sizes_and_reset_others():
    param = nn.Parameter(torch.zeros(50))
    scaler = noisy_scaler(param)
    ratio, replacement = scaler.get_normalized_variance(), nn.Parameter(torch.zeros(50))
    scaler.update_parameters([replacement])
    assert scaler.get_normalized_variance() == ratio
    replacement.grad = torch.randn(50)
    raw = replacement.grad.clone()
    factor = scaler.scale_gradients()
    torch.testing.assert_close(replacement.grad, raw * factor)
    with pytest.warns(UserWarning, match="reset"):
        scaler.update_parameters([nn.Parameter(torch.zeros(51))])
    assert scaler.step_count == 0


def test_metrics_carry_the_documented_names():
    scaler = noisy_scaler(nn.Parameter(torch.zeros(50)))
    assert scaler.metrics() == {
        "vgs/scaling_factor": scaler.get_scaling_factor(),
        "vgs/normalized_variance": scaler.get_normalized_variance(),
        "vgs/step_count": 20.0,
        "vgs/warmup_active": 0.0,
    }


@pytest.mark.parametrize(
    "bad",
    [
        {"alpha": -1.0},
        {"alpha": math.nan},
        {"beta": 1.0},
        {"beta": math.nan},
        {"warmup_steps": -1},
        {"min_scaling_factor": 0.0},
        {"min_scaling_factor": 1.5},
        {"statistic": "median"},
    ],
    ids=str,
)
def test_settings_that_cannot_be_meant_are_refused_by_name(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        VarianceGradientScaler([nn.Parameter(torch.zeros(2))], **bad)


def test_no_parameters_wrong_segments_and_sparse_gradients_are_refused():
    with pytest.raises(ConfigError, match="no parameters"):
        VarianceGradientScaler([])
    flat = nn.Parameter(torch.zeros(10))
    for segments in ([4, 5], [10, 0], []):
        with pytest.raises(ConfigError, match="segments"):
            VarianceGradientScaler([flat], segments=segments)
    with pytest.raises(ConfigError, match="segments"):
        VarianceGradientScaler([flat, flat], segments=[10, 10])
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse=False"):
        VarianceGradientScaler(table.parameters()).scale_gradients()


def test_no_gradient_at_all_is_not_an_observation():
    param = nn.Parameter(torch.zeros(3))
    scaler = VarianceGradientScaler([param])
    assert scaler.scale_gradients() == 1.0
    scaler.step()
    assert scaler.step_count == 0
