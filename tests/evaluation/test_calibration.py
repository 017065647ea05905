"""Held-out calibration on real agents: which steps count, and what is compared."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from stable_baselines3.common.vec_env import DummyVecEnv

from tailguard.errors import DataError
from tailguard.evaluation.calibration import HeldOut, draw, held_out
from tests.agents import tiny_agent
from tests.environments import ConstantReward, NoiseChain, vectorized
from tests.rollout.test_invalid_steps import Pausing


def test_returns_count_where_they_are_known() -> None:
    """Reward 1 for 6 steps: known to the end where the episode terminates, not at all where it is cut."""
    ended = partial(ConstantReward, 6, truncates=False)
    found = held_out(tiny_agent(vectorized(ended, 2), gamma=0.5), vectorized(ended, 2), 12)
    assert len(found.realised) == 24
    np.testing.assert_allclose(np.unique(found.realised), 2.0 * (1.0 - 0.5 ** np.arange(1, 7)))
    cut = partial(ConstantReward, 20, truncates=True)
    found = held_out(tiny_agent(vectorized(cut, 2), gamma=0.5), vectorized(cut, 2), 20)
    assert len(found.realised) == 2 * (20 - 6)  # 0.5^7 < 0.01: the last six steps hide more than one per cent
    np.testing.assert_allclose(found.realised, 2.0, atol=0.02)


def test_predictions_are_those_of_the_agent_before_each_step() -> None:
    agent = tiny_agent(vectorized(NoiseChain, 3), gamma=0.5)
    found = held_out(agent, vectorized(NoiseChain, 3), 20, warm_up=5)
    assert found.quantiles.shape == (3 * (20 - 5 - 6), 8)
    obs, state = np.zeros((3, 1), np.float32), None
    for _ in range(5):
        _, state = agent.predict(obs, state)
    np.testing.assert_allclose(found.quantiles[:3], agent.predict_quantiles(obs, state), rtol=1e-5)


def test_steps_that_do_not_count_are_not_compared() -> None:
    def resting() -> DummyVecEnv:
        return DummyVecEnv([lambda: Pausing("VV_", length=1000)] * 2)

    found = held_out(tiny_agent(resting(), gamma=0.5), resting(), 30)
    assert len(found.realised) == 2 * 16  # of 24 whose return is known


def test_nothing_known_is_said() -> None:
    agent = tiny_agent(vectorized(NoiseChain, 2), gamma=0.99)
    with pytest.raises(DataError, match=r"gamma=0\.99"):
        held_out(agent, vectorized(NoiseChain, 2), 10)


def test_summaries_of_a_right_forecast_and_its_picture(tmp_path: Path) -> None:
    from scipy import stats

    levels = tuple((i + 0.5) / 32 for i in range(32))
    realised = np.random.default_rng(0).normal(size=20_000)
    found = HeldOut(np.tile(stats.norm.ppf(levels), (20_000, 1)), realised, levels)
    assert found.worst < 0.01
    predicted, came = found.cvar(0.05)
    assert predicted == pytest.approx(-2.063, abs=0.002)
    assert came == pytest.approx(predicted, rel=0.03)
    assert found.cvar(1.0) == pytest.approx((0.0, 0.0), abs=0.02)
    assert np.abs(found.skill).max() < 0.01
    draw(found, tmp_path / "calibration.svg", "a right forecast")
    assert "<svg" in (tmp_path / "calibration.svg").read_text()
