"""Robust training on InvertedPendulum and on the regime market, beside plain training, under attack; and its cost."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from benchmarks.robustness import Result, cost, run_pendulum, run_regime

pytestmark = pytest.mark.slow

SEEDS = range(5)


@cache
def agents(task: str, kind: str, n_seeds: int) -> tuple[Result, ...]:
    run = {"pendulum": run_pendulum, "regime": run_regime}[task]
    return tuple(run(kind, seed) for seed in range(n_seeds))


def median(task: str, kind: str, attacks: tuple[str, ...], n_seeds: int = len(SEEDS)) -> float:
    """Of what each agent has left under the attack that is the worst for it."""
    return float(np.median([min(found.returns[name] for name in attacks) for found in agents(task, kind, n_seeds)]))


def test_plain_training_balances_the_pendulum_and_falls_under_attack() -> None:
    assert median("pendulum", "nominal", ("nobody",)) >= 950.0
    assert median("pendulum", "nominal", ("mad 0.75",)) <= 40.0


def test_robust_training_keeps_the_pendulum_up_under_attack() -> None:
    assert median("pendulum", "robust", ("nobody",)) >= 950.0
    assert median("pendulum", "robust", ("mad 0.75",)) >= 200.0
    assert median("pendulum", "robust", ("mad 1.1",)) >= 80.0


@pytest.mark.xfail(
    reason="plain agents lose 0.1 % to wrong prices; to mad at 0.1 robust ones lose as much as plain ones"
)
def test_on_the_regime_market_robust_training_halves_the_loss_to_price_noise_for_a_twentieth_of_the_reward() -> None:
    prices = ("price-random 5", "price 5", "mad 0.1")
    clean, safe = (median("regime", kind, ("nobody",), 3) for kind in ("nominal", "robust"))
    lost, kept = (
        median("regime", kind, ("nobody",), 3) - median("regime", kind, prices, 3) for kind in ("nominal", "robust")
    )
    assert safe >= 0.95 * clean
    assert kept <= 0.5 * lost


def test_three_steps_cost_at_most_two_and_a_half_updates_and_nobody_costs_nothing() -> None:
    found = cost()
    assert found["regulariser, 3 steps"] <= 2.5
    assert found["off"] == pytest.approx(1.0, abs=0.1)
