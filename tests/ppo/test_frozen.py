"""D1b: what is frozen stays as it is on every path, and the rest goes on learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tailguard import DistributionalPPO
from tailguard.policy import RecurrentPolicy
from tests.agents import collected, logged, tiny_agent
from tests.environments import cartpole, pendulum

PER_UPDATE = 32 * 4


def constant_rate(*args: Any, **settings: Any) -> DistributionalPPO:
    """The default rate has fallen to zero when `learn` ends."""
    return tiny_agent(*args, **{"learning_rate": 2e-3, **settings})


OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer": "adam"},
    {"optimizer": "adamw", "optimizer_kwargs": {"weight_decay": 0.1}},
    {"optimizer": "upgd", "optimizer_kwargs": {"sigma": 0.1, "weight_decay": 0.1, "adaptive_noise": True}},
    {"optimizer": "adaptive_upgd", "optimizer_kwargs": {"sigma": 0.1, "weight_decay": 0.1}},
    {"optimizer": "upgdw", "optimizer_kwargs": {"sigma": 0.1, "weight_decay": 0.1}, "vgs": {"warmup_steps": 0}},
    {"optimizer": "upgdw", "optimizer_kwargs": {"gate": "minmax", "fused": False}},
]
PATHS: dict[str, dict[str, Any]] = {
    "native": {},
    "torch": {"policy_kwargs": {"memory": "gru"}},
    "memoryless": {"policy": "MlpPolicy"},
    "clipped": {"critic": {"value_clip": 0.2}},
    "micro": {"microbatch_size": 16},
    "two threads": {"update_threads": 2},
    "risk": {"risk": {"mode": "episode", "weight": 0.5, "horizon": 8}},
    "attacked": {"adversary": {"epsilon": 0.1, "steps": 2, "weight": 0.5}},
}
WHAT = {
    "a critic": lambda policy: list(policy.critics[0].parameters()),
    "both critics": lambda policy: list(policy.critics.parameters()),
    "the actor": lambda policy: [*policy.actor.parameters(), *policy.action_head.parameters()],
    "layers of a trunk": lambda policy: list(policy.critics[1].trunk.layers.parameters()),
    "the action head": lambda policy: list(policy.action_head.parameters()),
    "one bias": lambda policy: [policy.actor.layers[0].bias],
    "everything": lambda policy: list(policy.parameters()),
}


def weights_of(agent: DistributionalPPO) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in agent.policy.named_parameters()}


def freeze(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.requires_grad_(False)


def assert_only_the_rest_learned(agent: DistributionalPPO, before: dict[str, torch.Tensor]) -> None:
    """Last layers of critics follow the return scale, frozen or not: what they predict is looked at instead."""
    for name, parameter in agent.policy.named_parameters():
        if "head.output" not in name and "risk_value.output" not in name:
            assert torch.equal(parameter, before[name]) == (not parameter.requires_grad), name


@pytest.mark.parametrize("what", WHAT)
@pytest.mark.parametrize("path", PATHS)
def test_what_is_frozen_stays_and_the_rest_learns(path: str, what: str) -> None:
    agent = constant_rate(ent_coef=0.01, **PATHS[path]).learn(2 * PER_UPDATE)
    freeze(WHAT[what](agent.policy))
    before = weights_of(agent)
    agent.learn(2 * PER_UPDATE, reset_num_timesteps=False)
    assert_only_the_rest_learned(agent, before)


@pytest.mark.parametrize("settings", OPTIMIZERS, ids=lambda settings: settings["optimizer"])
def test_neither_momentum_nor_decay_nor_noise_moves_it_and_unfrozen_it_learns_again(settings: dict[str, Any]) -> None:
    agent = constant_rate(**settings).learn(2 * PER_UPDATE)
    chosen = [*agent.policy.critics[0].trunk.parameters(), agent.policy.actor.layers[0].weight]
    freeze(chosen)
    before, vector = weights_of(agent), agent.learner.vector
    moments = {k: v.clone() for k, v in agent.learner.optimizer.state[vector.flat].items() if k not in ("step",)}
    agent.learn(2 * PER_UPDATE, reset_num_timesteps=False)
    assert_only_the_rest_learned(agent, before)
    for name, value in moments.items():
        for parameter in chosen:
            place = vector.where(parameter)
            assert torch.equal(agent.learner.optimizer.state[vector.flat][name][place], value[place]), name
    for parameter in chosen:
        parameter.requires_grad_(True)
    before = weights_of(agent)
    agent.learn(PER_UPDATE, reset_num_timesteps=False)
    assert all(not torch.equal(value, before[name]) for name, value in weights_of(agent).items())


def test_a_frozen_part_does_not_change_how_the_rest_learns() -> None:
    """Actor and critics share no weight; without a bound on their common norm the actor's steps are its own."""

    def trained(frozen: bool) -> DistributionalPPO:
        agent = collected(constant_rate(pendulum(4, 0), max_grad_norm=1e9))
        if frozen:
            freeze(list(agent.policy.critics.parameters()))
        agent.train()
        return agent

    one, two = trained(False), trained(True)
    for (name, a), b in zip(one.policy.named_parameters(), two.policy.parameters(), strict=True):
        if name.startswith(("actor", "action_head")):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", ["quantile", "categorical"])
def test_a_frozen_critic_predicts_what_it_predicted_while_the_return_scale_moves(kind: str) -> None:
    agent = constant_rate(critic={"kind": kind, "twin": False}).learn(2 * PER_UPDATE)
    freeze(list(agent.policy.critics.parameters()))
    seen = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)
    before, scale = agent.predict_quantiles(seen), agent.return_scale.snapshot
    agent.learn(3 * PER_UPDATE, reset_num_timesteps=False)
    assert agent.return_scale.snapshot != scale
    np.testing.assert_allclose(agent.predict_quantiles(seen), before, rtol=1e-4, atol=1e-4 * scale.std)


def test_a_frozen_critic_raises_no_alert_of_vanishing_gradients() -> None:
    agent = constant_rate().learn(PER_UPDATE)
    freeze(list(agent.policy.critics[0].parameters()))
    agent.learn(3 * PER_UPDATE, reset_num_timesteps=False)
    assert "train/critic1_grad_norm" not in logged(agent)
    assert logged(agent)["train/critic2_grad_norm"] > 0
    assert logged(agent).get("warn/critic1_vanishing_gradients", 0.0) == 0.0


def test_a_spread_that_is_frozen_stays_below_no_falling_ceiling() -> None:
    agent = constant_rate(pendulum(4, 0), policy_kwargs={"log_std_init": -0.5, "log_std_end": -3.0})
    freeze([agent.policy.action_head.log_std])
    agent.learn(4 * PER_UPDATE)
    assert torch.equal(agent.policy.action_head.log_std, torch.tensor([-0.5]))


def test_noise_measured_before_freezing_stays_so_that_steps_are_not_damped_for_what_does_not_learn() -> None:
    agent = constant_rate(vgs={"warmup_steps": 0}, learning_rate=1e-4).learn(2 * PER_UPDATE)
    frozen = [i for i, name in enumerate(agent.learner.vector.names) if name.startswith("critics.0.")]
    freeze(list(agent.policy.critics[0].parameters()))
    before = agent.learner.gradient_scaler.get_tensor_variances()
    agent.learn(2 * PER_UPDATE, reset_num_timesteps=False)
    after = agent.learner.gradient_scaler.get_tensor_variances()
    np.testing.assert_array_equal(after[frozen], before[frozen])
    assert not np.array_equal(after, before)


@pytest.mark.parametrize("settings", [OPTIMIZERS[0], OPTIMIZERS[4]], ids=["adam", "upgdw"])
def test_frozen_agents_are_saved_loaded_and_resumed_with_the_same_bits(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    agent = constant_rate(**settings).learn(PER_UPDATE)
    freeze([*agent.policy.critics[1].parameters(), agent.policy.actor.layers[0].weight])
    agent.learn(PER_UPDATE, reset_num_timesteps=False)
    agent.checkpoint(tmp_path / "agent")
    twin = DistributionalPPO.resume(tmp_path / "agent", cartpole(4, 0))
    flags = [parameter.requires_grad for parameter in agent.policy.parameters()]
    assert [parameter.requires_grad for parameter in twin.policy.parameters()] == flags
    assert not all(flags)
    for each in (agent, twin):
        each.learn(2 * PER_UPDATE, reset_num_timesteps=False)
    assert torch.equal(agent.learner.vector.flat, twin.learner.vector.flat)


class WithFrozenActor(RecurrentPolicy):
    """As one that was pretrained elsewhere."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.actor.memory.requires_grad_(False)


def test_what_a_subclass_freezes_when_it_is_built_can_learn_later() -> None:
    agent = DistributionalPPO(WithFrozenActor, cartpole(4, 0), n_steps=32, learning_rate=1e-3, seed=0)
    before = weights_of(agent)
    agent.learn(PER_UPDATE)
    assert_only_the_rest_learned(agent, before)
    agent.policy.actor.memory.requires_grad_(True)
    agent.learn(PER_UPDATE, reset_num_timesteps=False)
    assert not torch.equal(weights_of(agent)["actor.memory.bias.0"], before["actor.memory.bias.0"])
