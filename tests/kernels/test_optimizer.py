"""Steps of the UPGD family, norms and noise of gradients: the native core against its reference, and closed forms."""

from __future__ import annotations

import copy
import os
import pickle
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


@pytest.mark.parametrize("options", [{}, {"minmax": True}, {"protect_weights": False}], ids=str)
def test_the_number_of_threads_changes_no_bit(options: dict[str, bool]) -> None:
    rng = np.random.default_rng(0)
    parts = [random_part(rng, size, moments=True) for size in (200_001, 70_000)]
    results = []
    for n_threads in (1, 2, 3, 7):
        own = [copied(part) for part in parts]
        gates = door.gated_step(own, **{**OPTIONS, **options}, n_threads=n_threads)
        results.append([torch.tensor(gates, dtype=torch.float64), *(t for part in own for t in tensors(part))])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


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
    """With an eps of nothing a moment over eps would be beyond all numbers; the direction itself is not."""
    part = random_part(np.random.default_rng(0), 100, True, **changes)
    twin = copied(part)
    assert step([part], **{**OPTIONS, "finite_only": True}) is not None
    step([twin], **OPTIONS)
    assert_close(part.weights, twin.weights, rtol=1e-4, atol=1e-6)


@needs_the_core
def test_tensors_of_another_size_are_refused_before_anything_is_written() -> None:
    part = random_part(np.random.default_rng(0), 100, True)
    before = copied(part)
    for name in ("gradient", "utility", "first", "second"):
        with pytest.raises(ValueError, match="tensors of 100 elements"):
            door.gated_step([part, part._replace(**{name: torch.zeros(99)})], **OPTIONS)
    assert all(torch.equal(a, b) for a, b in zip(tensors(part), tensors(before), strict=True))


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


def random_blocks(rng: np.random.Generator, n_tensors: int) -> ObservedBlocks:
    """Some blocks with gaps between them, of lengths beside those of lanes; a tensor has one to four."""
    starts, lengths, sizes = [], [], []
    for _ in range(n_tensors):
        own = rng.choice([1, 5, 63, 64, 65, 300], size=rng.integers(1, 5))
        starts.append(np.cumsum(own + rng.integers(0, 9, size=len(own))) - own)
        lengths.append(own)
        sizes.append(starts[-1][-1] + own[-1] + rng.integers(0, 9))
    firsts = np.cumsum([0, *map(len, lengths)])
    return ObservedBlocks(np.array(sizes), np.concatenate(starts), np.concatenate(lengths), firsts)


def nothing_seen(blocks: ObservedBlocks) -> tuple[Tensor, np.ndarray]:
    return torch.zeros(int(blocks.observed.sum())), np.zeros((3, len(blocks.sizes)))


@pytest.mark.parametrize("seed", range(20))
def test_observed_gradients_move_averages_as_the_reference_says(seed: int) -> None:
    rng = np.random.default_rng(seed)
    blocks = random_blocks(rng, int(rng.integers(1, 6)))
    n = len(blocks.sizes)
    gradients = [torch.from_numpy(rng.normal(size=size).astype(np.float32)) for size in blocks.sizes]
    seen = rng.random(n) < 0.8
    mean = torch.from_numpy(rng.normal(size=blocks.observed.sum()).astype(np.float32))
    kept = np.stack([*(rng.random((2, n)) * 100), rng.integers(0, 50, size=n)])
    found = torch.empty_like(mean), np.empty_like(kept)
    given = [gradient if here else None for gradient, here in zip(gradients, seen, strict=True)]
    door.observe_gradients(given, blocks, 0.9, (mean, kept), found)
    flat = torch.cat([gradient * bool(here) for gradient, here in zip(gradients, seen, strict=True)])
    expected = reference.observe_gradient(flat, blocks.places, blocks.observed, seen, 0.9, mean, kept)
    assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)
    np.testing.assert_array_equal(found[1][:, ~seen], kept[:, ~seen])
    np.testing.assert_array_equal(found[1][2, seen], kept[2, seen] + 1)
    flat[torch.from_numpy(np.repeat(~seen, blocks.sizes))] = np.nan  # nobody looks there
    in_one = torch.empty_like(mean), np.empty_like(kept)
    door.observe_gradients([flat], blocks, 0.9, (mean, kept), in_one, np.flatnonzero(~seen).tolist())
    assert torch.equal(in_one[0], found[0])
    np.testing.assert_array_equal(in_one[1], found[1])


def test_averages_are_bias_corrected_from_the_first_observation_on() -> None:
    """With a window of 1 / (1 - beta) steps the first gradient counts whole, the second 1 / (1 + beta)."""
    blocks, beta = ObservedBlocks(np.array([2]), np.array([0]), np.array([2]), np.array([0, 1])), 0.9
    states = [nothing_seen(blocks) for _ in range(3)]
    for gradient, before, after in zip(([1.0, 2.0], [3.0, 4.0]), states[:2], states[1:], strict=True):
        door.observe_gradients([torch.tensor(gradient)], blocks, beta, before, after)
    assert_close(states[1][0], torch.tensor([1.0, 2.0]))
    np.testing.assert_allclose(states[1][1].ravel(), [5.0, 5.0, 1.0])
    weight = 1.0 / (1.0 + beta)
    mean = torch.tensor([1.0, 2.0]) + weight * 2.0
    assert_close(states[2][0], mean)
    power, signal = 5.0 + weight * (25.0 - 5.0), float(mean.square().sum())
    np.testing.assert_allclose(states[2][1].ravel(), [power, signal, 2.0], rtol=1e-6)


@needs_the_core
def test_gradients_of_another_size_blocks_outside_of_tensors_and_averages_of_another_shape_are_refused() -> None:
    layout = np.array([110]), np.array([0, 60]), np.array([50, 50])
    blocks = ObservedBlocks(*layout, np.array([0, 2]))
    mean, kept = nothing_seen(blocks)

    def observe(gradient: Tensor, mean: Tensor, kept: np.ndarray) -> None:
        door.observe_gradients([gradient], blocks, 0.9, (mean, kept), (mean.clone(), kept.copy()))

    with pytest.raises(ValueError, match=r"need \[110\] elements"):
        observe(torch.ones(100), mean, kept)
    with pytest.raises(ValueError, match="mean has shape"):
        observe(torch.ones(110), torch.zeros(99), kept)
    with pytest.raises(ValueError, match="kept has shape"):
        observe(torch.ones(110), mean, np.zeros((3, 2)))
    with pytest.raises(ValueError, match="do not fit their tensors"):
        ObservedBlocks(*layout, np.array([0, 1]))
    with pytest.raises(ValueError, match="do not fit their tensors"):
        ObservedBlocks(np.array([109]), *layout[1:], np.array([0, 2]))


def test_blocks_can_be_copied_and_pickled() -> None:
    blocks = random_blocks(np.random.default_rng(0), 3)
    gradient, before, results = torch.randn(int(blocks.sizes.sum())), nothing_seen(blocks), []
    pickled = pickle.loads(pickle.dumps(blocks))  # noqa: S301 (our own)
    for own in (blocks, copy.deepcopy(blocks), pickled):
        after = nothing_seen(blocks)
        door.observe_gradients([gradient], own, 0.9, before, after)
        results.append(after)
    for result in results[1:]:
        assert torch.equal(result[0], results[0][0])
        np.testing.assert_array_equal(result[1], results[0][1])


@needs_the_core
@pytest.mark.parametrize("level", ["0", "1"])
def test_older_instruction_sets_take_the_same_step(level: str) -> None:
    code = (
        "import numpy as np; from tailguard.kernels import native; rng = np.random.default_rng(0)\n"
        "arrays = [rng.normal(size=10_001).astype(np.float32) for _ in range(6)]; np.square(arrays[4], out=arrays[4])\n"
        "numbers = (0.01, 1.0, 0.1, 0.1, 0.99, 0.9, 0.999, 1e-8, 3.0)\n"
        "part = (10_001, *(array.ctypes.data for array in arrays))\n"
        "print(native().gated_step([part], [numbers], False, True, True, 1))\n"
        "print(float(arrays[0] @ rng.normal(size=10_001)))"
    )

    def run(**environment: str) -> list[float]:
        env = {**os.environ, **environment}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        return [float(line) for line in done.stdout.split()]

    assert run(TAILGUARD_LEVEL=level) == pytest.approx(run(), rel=1e-6)
