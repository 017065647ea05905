"""The pool is as good as fresh draws where an optimizer could notice: moments, independence in time and space."""

from __future__ import annotations

import pytest
import torch

from tailguard.optim.noise import OFFSETS, NoisePool

CPU = torch.device("cpu")


def series(pool: NoisePool, n: int, steps: int) -> torch.Tensor:
    """(T, n) noise of many steps."""
    rows = []
    for _ in range(steps):
        offset, sign = pool.draw(n)
        rows.append(sign * pool.read(CPU, torch.float32)[offset : offset + n])
    return torch.stack(rows)


def test_noise_is_standard_normal_over_time_for_every_weight():
    noise = series(NoisePool(torch.Generator().manual_seed(0)), n=64, steps=20_000)
    assert noise.mean(0).abs().max() < 5 / 20_000**0.5
    assert (noise.var(0) - 1).abs().max() < 0.05
    kurtosis = ((noise - noise.mean()) ** 4).mean() / noise.var() ** 2
    assert float(kurtosis) == pytest.approx(3.0, abs=0.1)


def test_noise_is_uncorrelated_over_time_and_between_weights():
    noise = series(NoisePool(torch.Generator().manual_seed(1)), n=64, steps=20_000)
    assert (noise[1:] * noise[:-1]).mean().abs() < 0.01
    covariance = noise.T @ noise / len(noise)
    assert (covariance - torch.eye(64)).abs().max() < 0.05


def test_a_larger_pool_begins_with_the_smaller_one():
    small, large = (NoisePool(torch.Generator().manual_seed(2)) for _ in range(2))
    small.draw(10)
    large.draw(3 * OFFSETS)
    a, b = small.read(CPU, torch.float32), large.read(CPU, torch.float32)
    assert torch.equal(a, b[: a.numel()])


def test_every_offset_fits_and_types_agree():
    pool = NoisePool(torch.Generator().manual_seed(3))
    pool.draw(OFFSETS + 1)
    assert pool.read(CPU, torch.float32).numel() >= OFFSETS - 1 + OFFSETS + 1
    assert torch.equal(pool.read(CPU, torch.float64).float(), pool.read(CPU, torch.float32))


def test_state_restores_the_pool_and_the_place_in_the_stream():
    pool = NoisePool(torch.Generator().manual_seed(4))
    series(pool, 8, 5)
    state = pool.state_dict()
    expected = series(pool, 8, 5)
    other = NoisePool(torch.Generator().manual_seed(5))
    series(other, 8, 1)
    other.load_state_dict(state)
    assert torch.equal(series(other, 8, 5), expected)
