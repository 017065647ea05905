"""Steps of the UPGD family, norms and noise of gradients: the native core against its reference, and closed forms."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tailguard import kernels
from tailguard.kernels import optimizer as door
from tailguard.kernels.optimizer import GatedPart, ObservedBlocks, StepNumbers
from tailguard.kernels.reference import optimizer as reference

OPTIONS = {"minmax": False, "protect_weights": True, "adaptive_noise": False, "finite_only": False}
BOTH = pytest.mark.parametrize("step", [door.gated_step, reference.gated_step], ids=["native", "reference"])
needs_the_core = pytest.mark.skipif(kernels.native() is None, reason=kernels.status())


def numbers(**changes: float) -> StepNumbers:
    usual = StepNumbers(
        rate=0.01, decay=0.999, l2=0.0, sigma=0.1, beta_utility=0.99, beta1=0.9, beta2=0.999, eps=1e-8, step=3.0
    )
    return usual._replace(**changes)


def random_part(rng: np.random.Generator, size: int, moments: bool, **changes: float) -> GatedPart:
    def normal() -> Tensor:
        return torch.from_numpy(rng.normal(size=size).astype(np.float32))

    first, second = (normal(), normal().square()) if moments else (None, None)
    noise = normal() if rng.random() < 0.7 else None
    return GatedPart(normal(), normal(), 0.3 * normal(), first, second, noise, numbers(**changes))


def copied(part: GatedPart) -> GatedPart:
    return GatedPart(*(t if t is None else t.clone() for t in part[:-1]), part.numbers)


def tensors(part: GatedPart) -> list[Tensor]:
    return [tensor for tensor in part[:-1] if tensor is not None]


@pytest.mark.parametrize("seed", range(60))
def test_a_gated_step_is_that_of_the_reference(seed: int) -> None:
    """Over random sizes, numbers and options; some sizes are just beside those of lanes and shares."""
    rng = np.random.default_rng(seed)
    sizes = rng.choice([1, 2, 63, 64, 65, 200, 1000, 8191, 8192, 8193, 20_001], size=rng.integers(1, 5))
    options = {name: bool(rng.random() < 0.5) for name in OPTIONS}
    moments, scale = bool(seed % 2), float(10.0 ** rng.uniform(-6, 3))
    parts = [
        random_part(
            rng,
            size,
            moments,
            rate=rng.uniform(0, 0.1),
            l2=rng.choice([0.0, 0.1]),
            sigma=rng.choice([-0.1, 0.1]),
            beta1=rng.choice([0.0, 0.9]),
            step=float(rng.integers(1, 50)),
        )
        for size in sizes
    ]
    for part in parts:
        part.gradient.mul_(scale)
    ours, theirs = [copied(part) for part in parts], [copied(part) for part in parts]
    gates, expected = door.gated_step(ours, **options), reference.gated_step(theirs, **options)
    assert gates == pytest.approx(expected, rel=1e-6)
    for mine, other, before in zip(ours, theirs, parts, strict=True):
        for a, b in zip(tensors(mine), tensors(other), strict=True):
            assert_close(a, b, rtol=1e-5, atol=1e-6 * max(1.0, scale))
        assert not torch.equal(mine.weights, before.weights)
        assert torch.equal(mine.gradient, before.gradient)


@BOTH
def test_the_gate_is_accurate_to_a_millionth_and_exactly_one_at_zero(step: Any) -> None:
    """Utilities are given, and a unit of noise on weights of zero moves each by its gate."""
    x = torch.cat([torch.linspace(-200, 1, 200_001), torch.tensor([-1e30, 0.0, 1.0])])
    zero, one = torch.zeros_like(x), torch.ones_like(x)
    given = numbers(rate=1.0, decay=1.0, sigma=1.0, beta_utility=0.5, step=1.0)
    part = GatedPart(zero.clone(), zero, x.clone(), None, None, one, given)
    total = step([part], **OPTIONS)
    gates = -part.weights.double()
    assert_close(gates, 2.0 * torch.sigmoid(-x.double()), rtol=0, atol=1e-6)
    assert gates[-2] == 1.0
    assert total == pytest.approx(float(gates.sum()), rel=1e-6)


@BOTH
def test_without_a_positive_utility_every_gate_is_exactly_one(step: Any) -> None:
    x = torch.tensor([-1e20, 0.0, -3.0])
    part = GatedPart(torch.zeros(3), torch.zeros(3), x, None, None, torch.ones(3), numbers(rate=1.0, sigma=1.0))
    assert step([part], **OPTIONS) == 3.0
    assert torch.equal(part.weights, -torch.ones(3))


def spoil(part: GatedPart, name: str, number: float) -> GatedPart:
    getattr(part, name)[17] = number
    return part


BEYOND = {
    "a rate without bounds": lambda part: part._replace(numbers=numbers(rate=1e39)),
    "noise without bounds": lambda part: part._replace(numbers=numbers(sigma=1e39), noise=torch.ones(100)),
    "noise that a small rate brings back": lambda part: part._replace(
        numbers=numbers(sigma=3e38, rate=1e-3), noise=torch.full((100,), 1.2)
    ),
    "nan in a weight": lambda part: spoil(part, "weights", np.nan),
    "inf in a gradient": lambda part: spoil(part, "gradient", np.inf),
    "nan in a utility": lambda part: spoil(part, "utility", np.nan),
    "inf in a moment": lambda part: spoil(part, "first", -np.inf),
    "inf in a second moment": lambda part: spoil(part, "second", np.inf),
    "a gradient whose square is lost": lambda part: spoil(part, "gradient", 1e20),
    "a gradient times a weight that is lost": lambda part: spoil(spoil(part, "gradient", 1e18), "weights", 1e22),
    "no eps beside no gradient": lambda part: spoil(
        spoil(spoil(part, "gradient", 0.0), "first", 0.0), "second", 0.0
    )._replace(numbers=numbers(eps=1e-60)),
}


@BOTH
@pytest.mark.parametrize("change", BEYOND.values(), ids=list(BEYOND))
def test_a_step_after_which_a_number_is_not_finite_is_left_out_on_request(step: Any, change: Any) -> None:
    rng = np.random.default_rng(0)
    parts = [random_part(rng, 10_000, True), change(random_part(rng, 100, True))]
    before = [copied(part) for part in parts]
    assert step(parts, **{**OPTIONS, "finite_only": True}) is None
    for part, own in zip(parts, before, strict=True):
        for a, b in zip(tensors(part), tensors(own), strict=True):
            assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


@BOTH
@pytest.mark.parametrize("changes", [{}, {"eps": 1e-38}, {"rate": 1e30}])
def test_a_step_that_stays_in_range_is_taken(step: Any, changes: dict[str, float]) -> None:
    """With an eps of nothing the first bound, moment over eps, is beyond all numbers; the direction itself is not."""
    part = random_part(np.random.default_rng(0), 100, True, **changes)
    twin = copied(part)
    assert step([part], **{**OPTIONS, "finite_only": True}) is not None
    step([twin], **OPTIONS)
    assert torch.equal(part.weights, twin.weights)


@needs_the_core
def test_arrays_of_another_size_are_refused_and_others_are_not_copied_unnoticed() -> None:
    part = random_part(np.random.default_rng(0), 100, True)
    with pytest.raises(ValueError, match="size of their parameter"):
        door.gated_step([part._replace(first=torch.zeros(99))], **OPTIONS)
    arrays = [tensor.numpy() for tensor in (part.weights, part.gradient, part.utility)]
    with pytest.raises(TypeError, match="incompatible function arguments"):
        kernels.native().gated_step(
            [(arrays[0].astype(np.float64), *arrays[1:], None, None, None)], [part.numbers], False, True, False, False
        )


def test_a_parameter_that_is_not_contiguous_moves_all_the_same() -> None:
    """It goes the reference's way."""
    part = random_part(np.random.default_rng(0), 64, False)._replace(noise=None)
    square = GatedPart(
        *(tensor if tensor is None else tensor.view(8, 8).clone().t() for tensor in part[:-1]), part.numbers
    )
    total = door.gated_step([square], **OPTIONS)
    assert total == pytest.approx(door.gated_step([part], **OPTIONS), rel=1e-6)
    assert_close(square.weights.t().reshape(-1), part.weights)


@pytest.mark.parametrize("size", [1, 63, 64, 1024, 200_003])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e30])
def test_squared_norms_of_spans_are_those_of_double_precision(size: int, scale: float) -> None:
    values = scale * torch.randn(size + 7)
    cuts = np.array([0, 3, 3, size + 3, size + 7])
    exact = [float(values[a:b].double().square().sum()) for a, b in pairwise(cuts)]
    np.testing.assert_allclose(door.squared_norms(values, cuts), exact, rtol=1e-12)
    np.testing.assert_allclose(reference.squared_norms(values, cuts), exact, rtol=1e-12)


def test_a_norm_does_not_hide_what_is_not_finite() -> None:
    values, cuts = torch.ones(5000), np.array([0, 2500, 5000])
    values[4321] = np.nan
    first, second = door.squared_norms(values, cuts)
    assert first == 2500.0
    assert np.isnan(second)


@needs_the_core
@pytest.mark.parametrize("cuts", [[0, 5001], [-1, 10], [10, 5]])
def test_cuts_outside_of_the_values_are_refused(cuts: list[int]) -> None:
    with pytest.raises(ValueError, match="cuts must not fall"):
        door.squared_norms(torch.ones(5000), np.array(cuts))


def random_blocks(rng: np.random.Generator, n_tensors: int) -> tuple[ObservedBlocks, int]:
    """Some blocks with gaps between them, of lengths beside those of lanes; a tensor has one to four."""
    per_tensor = rng.integers(1, 5, size=n_tensors)
    lengths = rng.choice([1, 5, 63, 64, 65, 300], size=per_tensor.sum())
    starts = np.cumsum(lengths + rng.integers(0, 9, size=len(lengths))) - lengths
    blocks = ObservedBlocks(starts, lengths, np.concatenate([[0], np.cumsum(per_tensor)]))
    return blocks, int(starts[-1] + lengths[-1])


@pytest.mark.parametrize("seed", range(20))
def test_an_observed_gradient_moves_means_as_the_reference_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_tensors = int(rng.integers(1, 6))
    blocks, size = random_blocks(rng, n_tensors)
    gradient = torch.from_numpy(rng.normal(size=size).astype(np.float32))
    weights = np.where(rng.random(n_tensors) < 0.8, rng.random(n_tensors), 0.0)
    mean = torch.from_numpy(rng.normal(size=blocks.sizes.sum()).astype(np.float32))
    ours, theirs = torch.empty_like(mean), torch.empty_like(mean)
    found = door.observe_gradient(gradient, blocks, weights, mean, ours)
    places = blocks.places_on(gradient.device)
    expected = reference.observe_gradient(gradient, places, blocks.sizes, weights, mean, theirs)
    assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert_close(theirs[: blocks.sizes[0]], torch.lerp(mean, gradient[places], float(weights[0]))[: blocks.sizes[0]])


@needs_the_core
def test_blocks_outside_of_the_gradient_are_refused() -> None:
    blocks = ObservedBlocks(np.array([0, 60]), np.array([50, 50]), np.array([0, 2]))
    with pytest.raises(ValueError, match="do not fit"):
        door.observe_gradient(torch.ones(100), blocks, np.ones(1), torch.zeros(100), torch.zeros(100))


@needs_the_core
@pytest.mark.parametrize("level", ["0", "1"])
def test_older_instruction_sets_take_the_same_step(level: str) -> None:
    code = (
        "import numpy as np; from tailguard.kernels import native; rng = np.random.default_rng(0)\n"
        "arrays = [rng.normal(size=10_001).astype(np.float32) for _ in range(6)]; np.square(arrays[4], out=arrays[4])\n"
        "numbers = (0.01, 1.0, 0.1, 0.1, 0.99, 0.9, 0.999, 1e-8, 3.0)\n"
        "print(native().gated_step([tuple(arrays)], [numbers], False, True, False, True))\n"
        "print(float(arrays[0] @ rng.normal(size=10_001)))"
    )

    def run(**environment: str) -> list[float]:
        env = {**os.environ, **environment}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        return [float(line) for line in done.stdout.split()]

    assert run(TAILGUARD_LEVEL=level) == pytest.approx(run(), rel=1e-6)
