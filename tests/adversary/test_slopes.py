"""The slope of a divergence in compiled loops is the one that torch finds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.testing import assert_close

from tailguard.adversary import frozen
from tailguard.adversary.search import slope_of
from tailguard.adversary.slopes import MOST_SEQUENCES, divergence_slope
from tailguard.policy import RecurrentPolicy, State
from tests.adversary.scenes import F, policy_of, scene_of

ACTIONS = {
    "gaussian": spaces.Box(-1.0, 1.0, (3,), np.float32),
    "choice": spaces.Discrete(5),
    "choices": spaces.MultiDiscrete([4, 4]),
}


def actor(action: str = "gaussian", **config: Any) -> RecurrentPolicy:
    return policy_of(F, ACTIONS[action], **{"lstm_hidden_size": 8, "net_arch": [8, 8], **config})


@pytest.mark.parametrize("n", [1, MOST_SEQUENCES, 2 * MOST_SEQUENCES + 3])
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize(
    "config",
    [{}, {"n_lstm_layers": 2, "activation_fn": "relu"}, {"net_arch": []}, {"action_bounds": "squash"}],
    ids=str,
)
def test_the_loops_find_the_slope_that_torch_finds(config: dict[str, Any], action: str, n: int) -> None:
    """After another state than zero, with episodes that start inside and a step that does not count."""
    policy = actor(action, **config)
    clean = scene_of(policy, n=n)
    drawn = torch.Generator().manual_seed(2)
    state = State(*(torch.randn(part.shape, generator=drawn) for part in clean.state))
    scene = clean._replace(state=state)
    target = scene.parameters(policy, scene.observations).detach()
    seen = scene.observations + 0.3 * torch.randn(scene.observations.shape, generator=drawn)
    found = divergence_slope(policy, scene, target)
    assert found is not None
    with frozen(policy):
        expected = slope_of(
            lambda observations: policy.action_head.divergence(target, scene.parameters(policy, observations)),
            scene.valid,
        )(seen.clone())
    assert expected.abs().max() > 1e-2
    assert_close(found(seen), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "policy",
    [
        policy_of(F, memory="gru", lstm_hidden_size=8),
        policy_of(F, memory="none"),
        policy_of(F, spaces.MultiDiscrete([2, 3]), lstm_hidden_size=8),
        policy_of(F, spaces.MultiBinary(2), lstm_hidden_size=8),
        policy_of(F, lstm_hidden_size=8).double(),
    ],
    ids=["gru", "no memory", "unequal choices", "switches", "float64"],
)
def test_what_the_loops_do_not_know_is_left_to_torch(policy: RecurrentPolicy) -> None:
    scene = scene_of(policy)
    assert divergence_slope(policy, scene, torch.zeros(1)) is None
