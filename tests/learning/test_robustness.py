"""Robust training against answers that are known: a bandit whose minimax policy can be computed."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tailguard import DistributionalPPO
from tailguard.schedules import Schedule
from tests.environments import Cliff

pytestmark = pytest.mark.slow

GRID = np.linspace(-1.0, 1.0, 2001)
REACH = 200  # points of the grid within 0.2
BEST_WORST = 0.3527
"""What the worst case costs at least, over all policies: to beat it is a bug of the measurement."""


@cache
def losses(weight: float, seed: int = 0) -> tuple[float, float]:
    """Mean squared error on the truth, and under the worst lie of up to 0.2, found by trying all of them."""
    agent = DistributionalPPO(
        "MlpPolicy",
        Cliff(64, seed),
        Schedule(start=2e-3, end=0.0),
        seed=seed,
        n_steps=32,
        critic={"twin": False, "n_quantiles": 8},
        adversary={"epsilon": 0.2, "weight": weight, "ramp": 0.3},
    ).learn(60_000)
    action = np.asarray(agent.predict(GRID[:, None].astype(np.float32), deterministic=True)[0], np.float64)[:, 0]
    wanted = np.tanh(25.0 * GRID)
    lies = [np.clip(np.arange(len(GRID)) + shift, 0, len(GRID) - 1) for shift in range(-REACH, REACH + 1)]
    worst = np.max([(action[lie] - wanted) ** 2 for lie in lies], axis=0)
    return float(((action - wanted) ** 2).mean()), float(worst.mean())


def worst_of_middles() -> float:
    """Worst-case loss of the policy that answers the middle of the targets a lie may hide behind what it sees."""
    wanted = np.tanh(25.0 * GRID)
    at = np.arange(len(GRID))
    low, high = wanted[np.clip(at - REACH, 0, None)], wanted[np.clip(at + REACH, None, len(GRID) - 1)]
    action = 0.5 * (low + high)
    lies = [np.clip(at + shift, 0, len(GRID) - 1) for shift in range(-REACH, REACH + 1)]
    return float(np.max([(action[lie] - wanted) ** 2 for lie in lies], axis=0).mean())


def test_without_a_penalty_the_bandit_is_solved_and_falls_to_a_lie() -> None:
    clean, worst = losses(0.0)
    assert clean <= 0.005
    assert 0.58 <= worst <= 0.70


def test_the_penalty_buys_robustness_for_little_and_never_beats_the_optimum() -> None:
    clean, worst = losses(1.0)
    assert worst <= 0.48
    assert clean <= 0.05
    for weight in (0.0, 0.5, 1.0):
        assert losses(weight)[1] >= BEST_WORST


def test_more_weight_is_more_robust_and_less_exact() -> None:
    found = [losses(weight) for weight in (0.0, 0.5, 1.0)]
    cleans, worsts = [clean for clean, _ in found], [worst for _, worst in found]
    assert worsts == sorted(worsts, reverse=True)
    assert cleans == sorted(cleans)


def test_the_policy_of_middles_does_not_beat_the_optimum_that_is_claimed() -> None:
    assert worst_of_middles() >= BEST_WORST
