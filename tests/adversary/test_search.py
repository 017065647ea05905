"""I2: the inner maximisation stays inside its ball, touches nothing else, and finds what enumeration finds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from tailguard.adversary import Ball, Scene, Search, frozen, worst_case
from tailguard.adversary.search import Objective
from tailguard.policy import Layout, RecurrentPolicy
from tests.adversary.scenes import B, F, L, cube, generator, linear_policy, policy_of, recurrent_policy, scene_of


def divergence_from_clean(policy: RecurrentPolicy, scene: Scene) -> Objective:
    clean = scene.parameters(policy, scene.observations).detach()
    return lambda observations: policy.action_head.divergence(clean, scene.parameters(policy, observations))


def attacked(policy: RecurrentPolicy, scene: Scene, ball: Ball, search: Search | None = None, seed: int = 0) -> Tensor:
    with frozen(policy):
        objective = divergence_from_clean(policy, scene)
        return worst_case(objective, scene, ball, search or Search(), generator(seed))


def exact_maximum(policy: RecurrentPolicy, epsilon: float) -> float:
    """Largest divergence of a linear policy over all vertices of the cube: it is convex, so a vertex has it."""
    vertices = epsilon * torch.tensor(list(product((-1.0, 1.0), repeat=policy.obs_features)))
    shift = vertices @ policy.action_head.mean.weight.detach().t()
    return float((0.5 * (shift / policy.action_head.log_std.detach().exp()).square()).sum(-1).max())


@pytest.mark.parametrize(("restarts", "share"), [(5, 0.99), (1, 0.95)])
def test_ten_steps_come_close_to_the_best_of_all_2048_vertices_and_never_above(restarts: int, share: float) -> None:
    ratios = []
    for seed in range(20):
        policy = linear_policy()
        torch.nn.init.normal_(policy.action_head.mean.weight, generator=generator(seed))
        scene = scene_of(policy, length=1, n=8, seed=seed)
        found = attacked(policy, scene, cube(11, 0.3), Search("pgd", 10, 0.25, restarts), seed)
        reached = divergence_from_clean(policy, scene)(found).detach()
        ratios.append(float(reached.mean()) / exact_maximum(policy, 0.3))
    assert np.mean(ratios) >= share, ratios
    assert max(ratios) <= 1.0 + 1e-4


@pytest.mark.parametrize("method", ["pgd", "sgld"])
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_perturbation_stays_in_its_ball_and_bounds_and_spares_masked_features_and_padding(
    norm: str, method: str
) -> None:
    policy = recurrent_policy()
    scene = scene_of(policy)
    sizes = torch.tensor([0.3, 0.0, 0.6, 0.1])
    ball = Ball(sizes, norm, low=torch.full((F,), -1.0), high=torch.full((F,), 1.0))
    moved = attacked(policy, scene, ball, Search(method, 5, 0.5)) - scene.observations
    unit = moved[..., sizes > 0] / sizes[sizes > 0]
    size = unit.abs().amax(-1) if norm == "linf" else unit.norm(dim=-1)
    assert float(size.max()) <= 1.0 + 1e-4
    assert float(size.max()) > 0.5
    assert not moved[..., 1].any()
    assert not moved[~scene.valid].any()
    outside = (scene.observations + moved).abs() > torch.maximum(scene.observations.abs(), torch.ones(())) + 1e-6
    assert not outside.any()


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_ascent_finds_more_than_a_random_perturbation(norm: str) -> None:
    policy = recurrent_policy()
    scene, ball = scene_of(policy), cube(F, 0.3, norm=norm)
    objective = divergence_from_clean(policy, scene)
    found = objective(attacked(policy, scene, ball)).detach()[scene.valid].mean()
    luck = [ball.moved(scene.observations, ball.draw(scene.observations.shape, generator(k))) for k in range(50)]
    assert found > max(objective(moved).detach()[scene.valid].mean() for moved in luck)


def test_gradients_flow_through_the_memory_so_that_an_early_step_changes_a_late_action() -> None:
    policy = recurrent_policy()
    scene = scene_of(policy)._replace(layout=Layout(np.zeros((L, B), np.bool_)))
    clean = scene.parameters(policy, scene.observations).detach()

    def last_action(observations: Tensor) -> Tensor:
        late = policy.action_head.divergence(clean, scene.parameters(policy, observations))
        return torch.cat([torch.zeros_like(late[:-1]), late[-1:]])

    everywhere = scene._replace(valid=torch.ones(L, B, dtype=torch.bool))
    with frozen(policy):
        found = worst_case(last_action, everywhere, cube(F, 0.3), Search(), generator())
    only_last = torch.cat([scene.observations[:-1], found[-1:]])
    assert (last_action(found)[-1] > last_action(only_last)[-1] * 1.05).all()


def test_nothing_but_the_observations_is_touched() -> None:
    policy = recurrent_policy()
    scene = scene_of(policy)
    before = [tensor.clone() for tensor in (scene.observations, *scene.state)]
    weights = [parameter.detach().clone() for parameter in policy.parameters()]
    attacked(policy, scene, cube(F, 0.3))
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert all(parameter.requires_grad for parameter in policy.parameters())
    for now, then in zip((scene.observations, *scene.state, *policy.parameters()), before + weights, strict=True):
        assert torch.equal(now, then)


def test_restarts_are_never_worse_than_one_start() -> None:
    policy = policy_of(F, memory="none", net_arch=[16])
    scene, ball = scene_of(policy), cube(F, 1.0)
    objective = divergence_from_clean(policy, scene)
    several = objective(attacked(policy, scene, ball, Search("pgd", 2, 1.0, 5))).detach()
    first = objective(attacked(policy, scene, ball, Search("pgd", 2, 1.0, 1))).detach()
    total, alone = ((values * scene.valid).sum(0) for values in (several, first))
    assert (total >= alone - 1e-5).all()
    assert (total > alone + 1e-5).any()


def test_the_ball_is_filled_evenly() -> None:
    disc = Ball(torch.tensor([1.0, 1.0, 0.0]), "l2").draw((4000, 3), generator())
    assert_close((disc.norm(dim=-1) < 0.5).float().mean(), torch.tensor(0.25), atol=0.03, rtol=0)
    assert not disc[:, 2].any()
