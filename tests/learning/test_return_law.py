"""Processes whose return is known in closed form: the critics must say so."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import ndtri

from tailguard import DistributionalPPO
from tests.environments import ConstantReward, NoiseChain, vectorized
from tests.learning.seeds import FALLING, interquartile_mean, over_seeds

pytestmark = pytest.mark.slow
GAMMA = 0.99
NOTHING = np.zeros((1, 1), np.float32)  # what both environments always show


def noise_chain_quantiles(seed: int, kind: str) -> NDArray[np.float64]:
    """Predicted quantiles (Q,) far from the start.

    A return is hundreds of steps long, so its mean is known to a few points only after half a million of them; large
    batches because one observation is all there is to fit.
    """
    settings = {"gamma": GAMMA, "n_steps": 128, "batch_size": 2_048, "critic": {"kind": kind}, "learning_rate": FALLING}
    model = DistributionalPPO("MlpLstmPolicy", vectorized(NoiseChain, 64, seed), seed=seed, **settings).learn(500_000)
    state = None
    for _ in range(100):
        _, state = model.predict(NOTHING, state)
    return model.predict_quantiles(NOTHING, state)[0]


def simulated_returns(n: int) -> NDArray[np.float64]:
    """Held-out discounted sums of unit noise; what is left after 1,000 steps is below 1e-4 of a reward."""
    rng = np.random.default_rng(2024)
    discounts = GAMMA ** np.arange(1_000)
    return np.concatenate([rng.normal(size=(1_000, 1_000)) @ discounts for _ in range(n // 1_000)])


@pytest.mark.parametrize("kind", ["quantile", "categorical"])
def test_the_critic_learns_the_law_of_the_return(kind: str) -> None:
    """std 1 / sqrt(1 - gamma^2) = 7.09; critics trained on lambda-returns end at 2.94."""
    quantiles = interquartile_mean(over_seeds(noise_chain_quantiles, kind))
    levels = (np.arange(len(quantiles)) + 0.5) / len(quantiles)
    scores, exact = ndtri(levels), 1.0 / np.sqrt(1.0 - GAMMA**2)

    assert quantiles.std() == pytest.approx(exact, rel=0.05)
    assert (quantiles @ scores) / (scores @ scores) == pytest.approx(exact, rel=0.05)
    covered = (simulated_returns(20_000)[:, None] <= quantiles).mean(0)
    np.testing.assert_allclose(covered, levels, atol=0.02)


def constant_reward_values(seed: int, policy: str, truncates: bool, limit: int) -> NDArray[np.float64]:
    """Mean of the predicted law at every step of one episode; rollouts end where episodes do."""
    env = vectorized(partial(ConstantReward, limit, truncates), 8, seed)
    model = DistributionalPPO(
        policy, env, gamma=GAMMA, gae_lambda=0.95, n_steps=limit, learning_rate=FALLING, seed=seed
    ).learn(100_000)
    values, state = [], None
    for _ in range(limit):
        values.append(model.predict_quantiles(NOTHING, state).mean())
        _, state = model.predict(NOTHING, state)
    return np.array(values)


@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpPolicy"])
def test_a_time_limit_does_not_end_the_value(policy: str) -> None:
    """Reward 1 for ever is worth 1 / (1 - gamma) = 100; 46 would mean that truncation was taken for death."""
    values = interquartile_mean(over_seeds(constant_reward_values, policy, True, 100))
    np.testing.assert_allclose(values, 100.0, atol=2.0)


def test_a_memory_counts_the_steps_that_are_left() -> None:
    """Nothing but memory tells how far a terminating episode has come: 63.4 at its start, 1 at its last step."""
    values = interquartile_mean(over_seeds(constant_reward_values, "MlpLstmPolicy", False, 100))
    left = np.arange(100, 0, -1)
    np.testing.assert_allclose(values, (1.0 - GAMMA**left) / (1.0 - GAMMA), atol=3.0)


def test_a_termination_ends_the_value_without_memory_too() -> None:
    """Without memory and clock one value v serves all steps: v = E[sum of k rewards + gamma^k v (0 after the end)]."""
    limit, lam = 100, 0.95
    values = interquartile_mean(over_seeds(constant_reward_values, "MlpPolicy", False, limit))
    np.testing.assert_allclose(values, aliased_value(limit, lam), atol=2.0)


def aliased_value(limit: int, lam: float) -> float:
    """That v, over a uniform number of steps left and a geometric horizon k."""
    left, horizon = np.arange(1, limit + 1)[:, None], np.arange(1, limit + 1)[None]
    chance = (1.0 - lam) * lam ** (horizon - 1.0) * np.ones((limit, 1))
    chance[:, -1] += lam**limit  # the longest horizon takes what is beyond
    summed = (1.0 - GAMMA ** np.minimum(horizon, left)) / (1.0 - GAMMA)
    carried = np.where(horizon < left, GAMMA ** np.minimum(horizon, left), 0.0)
    return float((chance * summed).sum() / (limit - (chance * carried).sum()))
