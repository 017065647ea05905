"""The simplest task there is, for every kind of action: do what the observation says."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from gymnasium import spaces

from tailguard import DistributionalPPO
from tests.environments import Identity, vectorized
from tests.learning.seeds import FALLING, interquartile_mean, mean_return, over_seeds

pytestmark = pytest.mark.slow
LENGTH = 20


def reward_per_step(seed: int, space: spaces.Space, steps: int) -> float:
    """gamma 0.5, because nothing done now matters later: a longer view only adds noise."""
    make = partial(Identity, space, LENGTH)
    model = DistributionalPPO(
        "MlpLstmPolicy", vectorized(make, 8, seed), gamma=0.5, learning_rate=FALLING, seed=seed
    ).learn(steps)
    return mean_return(model, vectorized(make, 4, seed=1_000 + seed), episodes=20) / LENGTH


@pytest.mark.parametrize(
    "space, steps, enough",
    [
        (spaces.Discrete(4), 10_000, 0.95),
        (spaces.MultiDiscrete([3, 2]), 10_000, 0.95),
        (spaces.MultiBinary(3), 10_000, 0.95),
        (
            spaces.Box(-1.0, 1.0, (2,), np.float32),
            20_000,
            -0.25,
        ),  # minus the distance; the best blind action earns -0.5
    ],
    ids=["discrete", "multi-discrete", "multi-binary", "box"],
)
def test_the_right_action_is_found(space: spaces.Space, steps: int, enough: float) -> None:
    assert interquartile_mean(over_seeds(reward_per_step, space, steps)) >= enough
