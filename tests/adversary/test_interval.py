"""Proven bounds: no perturbation, tried or searched, ever leaves them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from tailguard.adversary.interval import Lies, action_bounds, action_change_bound, has_bounds
from tailguard.errors import ConfigError
from tailguard.policy import RecurrentPolicy
from tests.adversary.scenes import B, F, L, cube, generator, linear_policy, policy_of, scene_of
from tests.adversary.test_search import attacked, exact_maximum

RADIUS = 0.1
KINDS = {
    "lstm": {"memory": "lstm", "lstm_hidden_size": 8, "net_arch": [8]},
    "two layers": {"memory": "lstm", "lstm_hidden_size": 4, "n_lstm_layers": 2, "net_arch": [8, 8]},
    "gru": {"memory": "gru", "lstm_hidden_size": 8, "net_arch": [8], "activation_fn": "relu"},
    "none": {"memory": "none", "net_arch": [16, 16], "activation_fn": "elu"},
}


def actions_of(policy: RecurrentPolicy, observations: Tensor, scene_seed: int = 0) -> np.ndarray:
    """(L, B, A) deterministic actions on whole sequences."""
    scene = scene_of(policy, seed=scene_seed)
    head = policy.action_head
    parameters = scene.parameters(policy, observations).detach()
    return head.to_env(head.mode(parameters).flatten(0, 1).numpy()).reshape(L, B, -1)


@pytest.mark.parametrize("kind", KINDS)
def test_no_perturbation_of_any_step_leaves_the_bounds(kind: str) -> None:
    policy = policy_of(F, **KINDS[kind])
    scene, ball = scene_of(policy), cube(F, RADIUS)
    starts = [row | (t == 0) for t, row in enumerate(scene.layout.starts)]
    bounds = action_bounds(policy, Lies(list(scene.observations), starts, ball.sizes))
    low, high = (np.stack([step[end].numpy() for step in bounds]) for end in (0, 1))
    corners = (ball.sizes * ball.draw(scene.observations.shape, generator(k)).sign() for k in range(200))
    tried = [scene.observations + corner for corner in corners]
    for observations in [*tried, scene.observations, attacked(policy, scene, ball)]:
        actions = actions_of(policy, observations)
        assert (actions >= low - 1e-6).all()
        assert (actions <= high + 1e-6).all()


def test_the_bound_of_a_linear_policy_is_never_below_the_best_vertex_and_met_for_one_action() -> None:
    policy = policy_of(11, spaces.Box(-100.0, 100.0, (1,), np.float32), memory="none", net_arch=[])
    scene = scene_of(policy, length=1, n=8)
    small = list(scene.observations * 0.01)
    change, width = action_change_bound(policy, Lies(small, [np.ones(8, bool)], cube(11, 0.01).sizes))
    furthest = (2.0 * exact_maximum(policy, 0.01)) ** 0.5 * 100.0  # of the mean, in units of the action space
    assert (change >= furthest * (1.0 - 1e-6)).all()
    np.testing.assert_allclose(change, furthest, rtol=1e-3)
    assert width == 200.0


def test_a_bound_grows_with_the_radius_and_shrinks_to_nothing_without_one() -> None:
    policy = policy_of(F, **KINDS["lstm"])
    scene = scene_of(policy)
    starts = [np.full(B, t == 0) for t in range(L)]
    sizes = [
        action_change_bound(policy, Lies(list(scene.observations), starts, cube(F, radius).sizes))[0].mean()
        for radius in (0.0, 1e-3, 1e-2, 1e-1)
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < 1e-4
    assert sizes[1] < 0.1


def test_what_cannot_be_bounded_is_refused() -> None:
    silu = policy_of(F, memory="none", net_arch=[4], activation_fn="silu")
    choices = policy_of(F, spaces.Discrete(3), memory="none", net_arch=[4])
    for policy, said in ((silu, "not monotone"), (choices, "continuous actions")):
        assert not has_bounds(policy)
        with pytest.raises(ConfigError, match=said):
            action_bounds(policy, Lies([torch.zeros(1, F)], [np.ones(1, bool)], torch.zeros(F)))
    assert has_bounds(linear_policy())
