"""C5: predicted quantiles are those of what happens, where the law is known and where memory has to find it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import norm

from tailguard import DistributionalPPO
from tailguard.env import oracle_env
from tailguard.evaluation.calibration import held_out
from tailguard.losses.risk import cvar_weights
from tailguard.presets import regime
from tests.environments import NoiseChain, vectorized
from tests.learning.seeds import FALLING, interquartile_mean, over_seeds

pytestmark = pytest.mark.slow
GAMMA, ALPHA = 0.99, 0.05


def chain_quantiles(seed: int) -> NDArray[np.float64]:
    """Predicted quantiles (Q,) of discounted unit noise; the chain is endless, so gamma alone ends it."""
    settings: dict[str, Any] = {"gamma": GAMMA, "n_steps": 128, "batch_size": 2_048, "learning_rate": FALLING}
    model = DistributionalPPO("MlpPolicy", vectorized(NoiseChain, 64, seed), seed=seed, **settings).learn(500_000)
    return model.predict_quantiles(np.zeros((1, 1), np.float32))[0]


def test_coverage_and_cvar_on_the_chain_are_those_of_its_law() -> None:
    quantiles = interquartile_mean(over_seeds(chain_quantiles))
    levels = tuple((i + 0.5) / len(quantiles) for i in range(len(quantiles)))
    std = 1.0 / np.sqrt(1.0 - GAMMA**2)
    np.testing.assert_allclose(norm(0.0, std).cdf(quantiles), levels, atol=0.02)
    exact = -std * norm.pdf(norm.ppf(ALPHA)) / ALPHA
    assert quantiles @ np.asarray(cvar_weights(levels, ALPHA, "normal")) == pytest.approx(exact, rel=0.05)


def regime_calibration(seed: int) -> NDArray[np.float64]:
    """(Q + 2,) coverage of every level, then predicted and realised CVaR, on bars that training never saw."""
    task = regime()
    agent = task.train(seed)
    env = oracle_env(task.market, 256, 1_000_000 + seed, episode_length=600)
    found = held_out(agent, env, 600, warm_up=100)
    return np.array([*found.coverage, *found.cvar(ALPHA)])


def test_coverage_and_cvar_on_the_regime_market_hold_out_of_sample() -> None:
    figures = interquartile_mean(over_seeds(regime_calibration))
    levels = regime().config.critic.levels
    np.testing.assert_allclose(figures[:-2], levels, atol=0.02)
    assert figures[-2] == pytest.approx(figures[-1], rel=0.05)
