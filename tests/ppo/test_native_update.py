"""N1: the native core gives the gradients and predictions of the definition in torch, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tailguard import kernels
from tailguard.errors import TailguardError
from tailguard.policy import native as native_trunks
from tailguard.ppo import DistributionalPPO
from tailguard.ppo.learner import Learner
from tailguard.ppo.native_update import why_torch_actor, why_torch_critics
from tailguard.ppo.update import LOSSES, batch_gradient, batch_loss, gradient_source
from tailguard.rollout.evaluate import evaluate_native, evaluate_torch
from tests.agents import collected, gradient_of, tiny_agent
from tests.environments import cartpole, pendulum
from tests.random_agents import random_settings

pytestmark = pytest.mark.skipif(kernels.native() is None, reason=kernels.status())

AGENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gaussian": {"env": pendulum},
    "two layers": {"policy_kwargs": {"n_lstm_layers": 2, "lstm_hidden_size": 13}},
    "no layers after the memory": {"policy_kwargs": {"net_arch": []}},
    "relu": {"policy_kwargs": {"activation_fn": "relu", "net_arch": [24, 7]}},
    "without memory": {"policy_kwargs": {"memory": "none"}},
    "hidden columns": {"policy_kwargs": {"hidden_from_critics": (0,)}},
    "one critic": {"critic": {"twin": False}},
    "one quantile": {"critic": {"n_quantiles": 1}},
    "many quantiles in the tail": {"critic": {"n_quantiles": 201, "grid": "tail"}},
    "pinball": {"critic": {"huber_kappa": 0.0}},
    "risk": {"env": pendulum, "risk": {"mode": "episode", "weight": 0.5, "horizon": 7}},
    "penalties": {"ent_coef": 0.01, "kl_penalty": {"target": 1e-3}},
}


def agent_of(settings: dict[str, Any]) -> DistributionalPPO:
    """An agent after an update, so that its weights and states are no longer those of the start, with a rollout."""
    given = dict(settings)
    agent = tiny_agent(given.pop("env", cartpole)(4, 0), **given)
    agent.learn(128)
    return collected(agent)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))


def gradients_by_both(agent: DistributionalPPO, micro_sequences: int | None = None) -> tuple[torch.Tensor, ...]:
    """(native, torch) gradients of one batch."""
    agent.move_return_scale()
    batch = agent.sequences()
    assert why_torch_learns(agent.learner) is None
    native = gradient_of(agent, batch, micro_sequences)
    agent.learner.vector.zero_gradients()
    with torch_alone():
        batch_loss(agent.learner, batch, agent.schedules())[0].backward()
    return native, agent.learner.vector.gradient.clone()


@contextmanager
def torch_alone() -> Iterator[None]:
    """Trunks run through torch, as where there is no native core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_trunks, "native", lambda: None)
        yield


@pytest.mark.parametrize("settings", AGENTS.values(), ids=AGENTS.keys())
@pytest.mark.parametrize("masked", [False, True])
def test_native_gradients_are_those_of_the_definition(settings: dict[str, Any], masked: bool) -> None:
    agent = agent_of(settings)
    if masked:
        rng = np.random.default_rng(0)
        agent.rollout_buffer.valid[:] = rng.random((32, 4)) < 0.7
        agent.rollout_buffer.valid[:8, 1] = False
    native, expected = gradients_by_both(agent)
    assert relative(native, expected) <= 2e-6


@pytest.mark.parametrize("settings", [AGENTS["plain"], AGENTS["risk"]], ids=["plain", "risk"])
def test_native_losses_are_those_of_the_definition(settings: dict[str, Any]) -> None:
    agent = agent_of(settings)
    agent.move_return_scale()
    batch, schedules = agent.sequences(), agent.schedules()
    source = gradient_source(agent.learner, batch, schedules)
    row = batch_gradient(agent.learner, batch, np.arange(batch.n_sequences), source)
    _, figures = batch_loss(agent.learner, batch, schedules)
    assert row is not None
    for metric, figure in zip(LOSSES, figures, strict=True):
        assert row[metric] == pytest.approx(figure, rel=1e-5, abs=2e-6), metric.name


@pytest.mark.parametrize("micro", [1, 3, 5])
def test_native_micro_batches_add_up(micro: int) -> None:
    agent = agent_of(AGENTS["risk"])
    agent.rollout_buffer.valid[3:9, 2] = False
    native, expected = gradients_by_both(agent, micro)
    assert relative(native, expected) <= 2e-6


@pytest.mark.parametrize("settings", AGENTS.values(), ids=AGENTS.keys())
def test_native_predictions_on_a_rollout_are_those_of_torch(settings: dict[str, Any]) -> None:
    agent = agent_of(settings)
    buffer, policy, live = agent.rollout_buffer, agent.policy, agent.live
    assert live is not None
    assert settings.get("env") is pendulum or buffer.starts[1:].any()
    before = [states[0] for states in zip(*buffer.critic_states, strict=True)]
    live.critic_states = before
    for n_threads in (1, 3):
        found = evaluate_native(policy, buffer, live, n_threads)
        for critic, state, native in zip(policy.critic_list, before, found, strict=True):
            with torch.inference_mode():
                expected = evaluate_torch(critic, buffer, state, live.starts)
            for name in ("steps", "terminal", "following"):
                ours, theirs = getattr(native, name).quantiles, getattr(expected, name).quantiles
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
            for ours, theirs in zip((*native.states, native.after), (*expected.states, expected.after), strict=True):
                torch.testing.assert_close(ours.hidden, theirs.hidden, rtol=1e-5, atol=2e-6)
                torch.testing.assert_close(ours.cell, theirs.cell, rtol=1e-5, atol=2e-6)


def why_torch_learns(learner: Learner) -> str | None:
    """Why at least one part of the update is torch's."""
    return why_torch_actor(learner) or why_torch_critics(learner)


def compare_random_agents(seed: int, wanted: int) -> None:
    """Gradients of random configurations by both, as far as the native core knows them."""
    rng, compared = Random(seed), 0
    while compared < wanted:
        settings = random_settings(rng, 60)
        try:
            agent = settings.agent()
        except (TailguardError, UserWarning):
            continue
        if why_torch_learns(agent.learner) is None:
            collected(agent)
            native, expected = gradients_by_both(agent)
            assert torch.isfinite(native).all(), settings
            assert relative(native, expected) <= 1e-5, settings
            compared += 1


def test_native_gradients_of_random_configurations() -> None:
    compare_random_agents(seed=0, wanted=15)


@pytest.mark.slow
def test_native_gradients_of_500_random_configurations() -> None:
    compare_random_agents(seed=1, wanted=500)


def test_the_number_of_threads_changes_no_bit_of_a_training() -> None:
    flats = [
        tiny_agent(pendulum(4, 0), update_threads=n).learn(512).learner.vector.flat.detach().clone() for n in (1, 2, 3)
    ]
    assert torch.equal(flats[0], flats[1])
    assert torch.equal(flats[0], flats[2])


LEFT_TO_TORCH: dict[str, dict[str, Any]] = {
    "squashed": {"env": pendulum, "policy_kwargs": {"action_bounds": "squash"}},
    "gru": {"policy_kwargs": {"memory": "gru"}},
    "elu": {"policy_kwargs": {"activation_fn": "elu"}},
    "categorical critic": {"critic": {"kind": "categorical"}},
    "value clipping": {"critic": {"value_clip": 0.2}},
    "adversary": {"env": pendulum, "adversary": {"epsilon": 0.1}},
}


@pytest.mark.parametrize("settings", LEFT_TO_TORCH.values(), ids=LEFT_TO_TORCH.keys())
def test_what_the_native_core_does_not_know_is_left_to_torch_with_a_reason(settings: dict[str, Any]) -> None:
    given = dict(settings)
    agent = tiny_agent(given.pop("env", cartpole)(4, 0), **given)
    assert why_torch_learns(agent.learner) is not None
    assert "torch (" in agent.update_runs_on
    agent.learn(128)


BESIDE_TORCH: dict[str, dict[str, Any]] = {
    "squashed": LEFT_TO_TORCH["squashed"],
    "categorical critic": LEFT_TO_TORCH["categorical critic"],
    "value clipping": LEFT_TO_TORCH["value clipping"],
    "two layers": {"critic": {"value_clip": 0.2}, "policy_kwargs": {"n_lstm_layers": 2, "net_arch": []}},
    "hidden columns": {"critic": {"value_clip": 0.2}, "policy_kwargs": {"hidden_from_critics": (0,)}},
    "risk": {**AGENTS["risk"], "critic": {"value_clip": 0.2}},
    "regulariser": {"env": pendulum, "adversary": {"epsilon": 0.1, "ramp": 0.0, "norm": "l2"}},
    "mixed": {"env": pendulum, "adversary": {"epsilon": 0.1, "ramp": 0.0, "norm": "l2", "mode": "mixed"}},
}


@pytest.mark.parametrize("settings", BESIDE_TORCH.values(), ids=BESIDE_TORCH.keys())
def test_lstm_trunks_of_the_core_inside_a_loss_of_torch_change_no_gradient(settings: dict[str, Any]) -> None:
    agent = agent_of(settings)
    agent.rollout_buffer.valid[3:9, 2] = False
    agent.rollout_buffer.starts[5:7] = True
    agent.move_return_scale()
    batch, noise = agent.sequences(), agent.randomness.adversary.get_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch, "lstm")  # nothing may call it
        found = gradient_of(agent, batch)
    agent.learner.vector.zero_gradients()
    agent.randomness.adversary.set_state(noise)
    with torch_alone():
        expected = gradient_of(agent, batch)
    assert relative(found, expected) <= 1e-5


def test_hooks_and_frozen_parameters_are_left_to_torch() -> None:
    hooked, frozen = tiny_agent(), tiny_agent()
    hooked.policy.critics[0].trunk.register_forward_hook(lambda *_: None)
    frozen.policy.actor.requires_grad_(False)
    assert "hook" in str(why_torch_learns(hooked.learner))
    assert "frozen" in str(why_torch_learns(frozen.learner))
