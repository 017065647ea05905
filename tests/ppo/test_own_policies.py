"""D1b: a policy with layers, methods or hooks of a user's own is that policy when it acts, trains and predicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tailguard import DistributionalPPO
from tailguard.adversary.interval import has_bounds
from tailguard.errors import CheckpointError, ConfigError
from tailguard.policy import Layout, RecurrentPolicy, State
from tailguard.policy.recurrent import LSTM
from tailguard.robustness.play import Victim
from tests.agents import TINY, TINY_POLICY, collected, logged, tiny_agent
from tests.environments import cartpole, pendulum

PER_UPDATE = 32 * 4


def constant_rate(*args: Any, **settings: Any) -> DistributionalPPO:
    """The default rate has fallen to zero when `learn` ends."""
    return tiny_agent(*args, **{"learning_rate": 2e-3, **settings})


class Twisted(nn.Module):
    """A layer that the native core does not know."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-3.0, 3.0, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.scale * x)


class OneMoreLayer(RecurrentPolicy):
    """Appended to what reads the memory, in the actor and in the critics."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.actor.layers.append(Twisted(self.actor.out_features))
        for critic in self.critic_list:
            critic.trunk.layers.append(Twisted(critic.trunk.out_features))


class LinearAppended(RecurrentPolicy):
    """A linear layer without an activation before or after it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.actor.layers.append(nn.Linear(self.actor.out_features, self.actor.out_features))


class OwnParameters(RecurrentPolicy):
    """The law of actions is changed behind the head, with a weight of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tilt = nn.Parameter(torch.tensor(2.5))

    def action_parameters(self, obs: Tensor, layout: Layout, state: State) -> Tensor:
        parameters = super().action_parameters(obs, layout, state)
        logits = parameters + self.tilt * torch.arange(parameters.shape[-1], dtype=parameters.dtype)
        return logits.log_softmax(-1)


class OwnMemory(LSTM):
    def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        features, after = super().step(x, state)
        return 3.0 * features, after

    def unroll(self, x: Tensor, layout: Layout, state: State, extra: Tensor | None = None) -> Any:
        unrolled = super().unroll(x, layout, state)
        return unrolled._replace(features=3.0 * unrolled.features)


def built(kind: type[RecurrentPolicy]) -> DistributionalPPO:
    return DistributionalPPO(kind, cartpole(4, 0), policy_kwargs=TINY_POLICY, seed=0, **TINY, learning_rate=2e-3)


def assert_one_policy(agent: DistributionalPPO) -> None:
    """Acting, training and `predict` agree, step by step through a rollout, and so does what attacks and scores use."""
    agent = collected(agent)
    buffer, state, policy = agent.rollout_buffer, None, agent.policy
    with torch.no_grad():
        layout, first = Layout(buffer.starts.copy()), policy.initial_state(buffer.n_envs)
        parameters = policy.action_parameters(torch.from_numpy(buffer.observations), layout, first)
        log_probs = policy.action_head.log_prob(parameters, torch.from_numpy(buffer.actions)).numpy()
        modes = policy.action_head.to_env(policy.action_head.mode(parameters).flatten(0, 1).numpy())
    np.testing.assert_allclose(log_probs, buffer.log_probs, rtol=1e-4, atol=1e-5)  # acting saw what training sees
    predicted, scored = [], []
    memory = policy.initial_state(buffer.n_envs)
    for observations, starts in zip(buffer.observations, buffer.starts, strict=True):
        action, state = agent.predict(observations, state, starts, deterministic=True)
        predicted.append(action)
        memory = memory.keep(torch.from_numpy(~starts).float())
        with torch.no_grad():
            parameters, memory = policy.action_step(torch.from_numpy(observations), memory)
        scored.append(policy.action_head.to_env(policy.action_head.mode(parameters).numpy()))
    np.testing.assert_allclose(np.concatenate(predicted), modes, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.concatenate(scored), modes, rtol=1e-4, atol=1e-5)
    agent.train()
    assert logged(agent)["train/first_log_ratio_max_abs"] < 1e-5


OWN: dict[str, Callable[[], DistributionalPPO]] = {
    "one more layer": lambda: built(OneMoreLayer),
    "a linear one": lambda: built(LinearAppended),
    "an overridden method": lambda: built(OwnParameters),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_policy_of_ones_own_is_one_policy(kind: str) -> None:
    assert_one_policy(OWN[kind]())


@pytest.mark.parametrize("kind", OWN)
def test_it_learns_and_every_parameter_of_its_own_does(kind: str) -> None:
    agent = OWN[kind]()
    before = {name: parameter.detach().clone() for name, parameter in agent.policy.named_parameters()}
    agent.learn(PER_UPDATE)
    still = [name for name, parameter in agent.policy.named_parameters() if torch.equal(parameter, before[name])]
    assert still == []


def replace_layers(agent: DistributionalPPO) -> None:
    agent.policy.actor.layers[1] = Twisted(8)


def replace_memory(agent: DistributionalPPO) -> None:
    memory = OwnMemory(2, 8, 1)
    memory.load_state_dict(agent.policy.actor.memory.state_dict())
    agent.policy.actor.memory = memory


def replace_a_method(agent: DistributionalPPO) -> None:
    layers = agent.policy.actor.layers
    forward = layers.forward
    layers.forward = lambda x: 5.0 * forward(x)  # type: ignore[method-assign]


def hook_layers(agent: DistributionalPPO) -> None:
    agent.policy.actor.layers.register_forward_hook(lambda module, args, output: 5.0 * output)


def hook_a_linear_layer(agent: DistributionalPPO) -> None:
    agent.policy.action_head.last_layer.register_forward_hook(lambda module, args, output: -4.0 * output)


def hook_the_input(agent: DistributionalPPO) -> None:
    agent.policy.actor.layers.register_forward_pre_hook(lambda module, args: (3.0 * args[0],))


CHANGES = [replace_layers, replace_memory, replace_a_method, hook_layers, hook_a_linear_layer, hook_the_input]


@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_is_replaced_or_hooked_later_acts_everywhere(change: Callable[[Any], None]) -> None:
    agent = constant_rate().learn(2 * PER_UPDATE)
    seen = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)

    def logits() -> Tensor:
        with torch.no_grad():
            return agent.policy.action_step(torch.from_numpy(seen), agent.policy.initial_state(64))[0]

    before = logits()
    change(agent)
    assert not torch.allclose(logits(), before, atol=1e-3)
    assert_one_policy(agent)


@pytest.mark.parametrize("where", ["trunk.layers", "trunk.memory", "trunk", "head", "head.output"])
def test_a_hook_on_a_critic_is_called_when_it_judges_trains_and_predicts(where: str) -> None:
    agent, calls = constant_rate().learn(PER_UPDATE), []
    module = agent.policy.critics[0].get_submodule(where)
    module.register_forward_hook(lambda module, args, output: calls.append(torch.is_grad_enabled()))
    collected(agent)
    assert calls  # it judged the rollout
    calls.clear()
    agent.train()
    assert any(calls)  # with gradient
    calls.clear()
    agent.predict_quantiles(np.zeros((3, 2), np.float32))
    assert calls


def test_a_new_module_learns_and_what_was_there_keeps_its_momentum() -> None:
    agent = constant_rate().learn(2 * PER_UPDATE)
    before = agent.learner.optimizer.state[agent.learner.vector.flat]["exp_avg"].clone()
    place = agent.learner.vector.where(agent.policy.actor.layers[0].weight)
    agent.policy.action_head.logits = nn.Linear(8, 2)  # a head that starts anew, of the same shape
    fresh = agent.policy.action_head.logits.weight.detach().clone()
    agent.renew_learner()
    after = agent.learner.optimizer.state[agent.learner.vector.flat]["exp_avg"]
    assert torch.equal(after[place], before[place])
    assert not after[agent.learner.vector.where(agent.policy.action_head.logits.weight)].any()
    agent.learn(PER_UPDATE, reset_num_timesteps=False)
    assert not torch.equal(agent.policy.action_head.logits.weight, fresh)


def test_data_that_is_replaced_behind_a_parameter_goes_on_learning() -> None:
    agent = constant_rate().learn(PER_UPDATE)
    weight = agent.policy.actor.layers[0].weight
    weight.data = torch.zeros_like(weight)
    agent.learn(PER_UPDATE, reset_num_timesteps=False)
    assert bool(weight.any())
    state, _ = agent.predict(np.ones((1, 2), np.float32)), agent.get_parameters()
    assert torch.equal(agent.policy.state_dict()["actor.layers.0.weight"], weight)
    assert state


def test_hooks_that_nobody_would_call_are_refused() -> None:
    for name in ("", "critics.0", "critics"):
        agent = constant_rate()
        agent.policy.get_submodule(name).register_forward_hook(lambda *_: None)
        with pytest.raises(ConfigError, match="would never be called"):
            agent.learn(PER_UPDATE)


def test_a_method_that_only_some_paths_go_through_is_refused() -> None:
    class ActsOtherwise(RecurrentPolicy):
        def action_step(self, obs: Tensor, state: State) -> tuple[Tensor, State]:
            return super().action_step(2.0 * obs, state)

    with pytest.raises(ConfigError, match=r"ActsOtherwise overrides action_step.*Override action_parameters"):
        built(ActsOtherwise).learn(PER_UPDATE)

    class StepsOtherwise(LSTM):
        def step(self, x: Tensor, state: State) -> tuple[Tensor, State]:
            return super().step(2.0 * x, state)

    agent = constant_rate()
    agent.policy.actor.memory = StepsOtherwise(2, 8, 1)
    with pytest.raises(ConfigError, match="StepsOtherwise overrides step alone"):
        agent.learn(PER_UPDATE)


def test_a_hook_that_only_looks_changes_no_return_scale_and_one_that_bends_a_critic_is_refused() -> None:
    watched, bent = constant_rate(), constant_rate()
    watched.policy.critics[0].head.output.register_forward_hook(lambda *_: None)
    watched.learn(3 * PER_UPDATE)
    assert watched.return_scale.count > 0
    bent.policy.critics[0].head.output.register_forward_hook(lambda module, args, output: 2.0 * output)
    with pytest.raises(ConfigError, match="does not follow the return scale"):
        bent.learn(3 * PER_UPDATE)
    fixed = constant_rate(return_scale={"enabled": False})
    fixed.policy.critics[0].head.output.register_forward_hook(lambda module, args, output: 2.0 * output)
    fixed.learn(3 * PER_UPDATE)


def test_attacks_see_the_policy_as_it_is_and_no_bound_is_promised_for_one_of_ones_own() -> None:
    agent = constant_rate(pendulum(2, 0), batch_size=32).learn(64)
    assert has_bounds(agent.policy)
    hook_layers(agent)
    assert not has_bounds(agent.policy)
    victim = Victim(agent)
    victim.reset()
    moment = victim.moment()
    action, _ = agent.predict(victim.observations, None, deterministic=True)
    head = agent.policy.action_head
    np.testing.assert_allclose(head.to_env(head.mode(moment.unharmed).numpy()), action, rtol=1e-5)


def test_critics_beside_an_attack_see_no_more_than_in_training() -> None:
    agent = constant_rate(policy_kwargs={"hidden_from_critics": [0]}).learn(PER_UPDATE)
    victim = Victim(agent)
    victim.reset()
    seen, moment = victim.observations, victim.moment()
    victim.step(moment, moment.observations)
    _, state = agent.predict(seen)
    assert state is not None
    for c, memory in enumerate(victim.critic_memories):
        np.testing.assert_allclose(memory.hidden[0].numpy(), state[0][1 + c], rtol=1e-5)


def test_a_policy_of_ones_own_is_loaded_with_its_class(tmp_path: Path) -> None:
    agent = built(OneMoreLayer).learn(PER_UPDATE)
    agent.checkpoint(tmp_path / "agent")
    with pytest.raises(CheckpointError, match=r"OneMoreLayer.*custom_objects"):
        DistributionalPPO.load(tmp_path / "agent")
    given = {"policy_class": OneMoreLayer}
    twin = DistributionalPPO.resume(tmp_path / "agent", cartpole(4, 0), custom_objects=given)
    for each in (agent, twin):
        each.learn(PER_UPDATE, reset_num_timesteps=False)
    assert torch.equal(agent.learner.vector.flat, twin.learner.vector.flat)
