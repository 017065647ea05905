"""A1-A5 on real agents: the return scale moves once per update and no decoded value moves with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tailguard.normalization import Affine
from tests.agents import collected, tiny_agent
from tests.environments import NoiseChain, vectorized


def decoded(agent: Any) -> np.ndarray:
    observations = np.linspace(-1.0, 1.0, 22, dtype=np.float32).reshape(11, 2)
    return agent.predict_quantiles(observations)


@pytest.mark.parametrize("kind", ["quantile", "categorical"])
@pytest.mark.parametrize("updates", [0, 2])
def test_rescaling_moves_no_decoded_value(kind: str, updates: int) -> None:
    agent = tiny_agent(critic={"kind": kind})
    if updates:
        agent.learn(updates * 128)
    collected(agent)
    before, old = decoded(agent), agent.return_scale.snapshot
    agent.move_return_scale()
    assert agent.return_scale.snapshot != old
    if kind == "categorical" and updates == 0:
        return  # a fresh categorical critic lays its atoms over the first returns: there is nothing to keep yet
    np.testing.assert_allclose(decoded(agent), before, rtol=1e-5, atol=1e-5 * np.abs(before).max())


@pytest.mark.parametrize(("mean", "std"), [(100.0, 20.0), (-3.0, 0.01), (1e4, 1e3)])
def test_even_a_violent_change_of_unit_keeps_quantile_critics_in_place(mean: float, std: float) -> None:
    agent = tiny_agent()
    agent.learn(256)
    before, old = decoded(agent), agent.return_scale.snapshot
    agent.policy.rescale_critics(old, Affine(mean, std), first=False)
    agent.return_scale.snapshot = Affine(mean, std)
    np.testing.assert_allclose(decoded(agent), before, rtol=1e-5, atol=1e-5 * (np.abs(before).max() + std))


def test_the_snapshot_equals_the_statistics_after_train_and_both_have_moved() -> None:
    agent = tiny_agent()
    agent.learn(128)
    scale = agent.return_scale
    assert scale.snapshot == (scale.mean, scale.std)
    assert scale.snapshot != (0.0, 1.0)
    assert scale.count == 128


def test_the_scale_moves_once_per_update_and_never_while_collecting() -> None:
    agent = tiny_agent()
    agent.learn(128)
    after_first = agent.return_scale.snapshot
    collected(agent)
    assert agent.return_scale.snapshot == after_first
    agent.train()
    assert agent.return_scale.snapshot != after_first
    assert agent.return_scale.count == 256


def test_the_buffer_holds_raw_units_whatever_the_scale() -> None:
    """Rewards around 1000 per step: values, advantages and returns are of the size of real returns."""
    agent = tiny_agent(vectorized(lambda: NoiseChain(mean=1000.0), 4), gamma=0.9, learning_rate=1e-2)
    agent.learn(30 * 128)
    collected(agent)
    buffer = agent.rollout_buffer
    np.testing.assert_allclose(buffer.rewards.mean(), 1000.0, rtol=0.01)
    assert buffer.values.mean() == pytest.approx(1e4, rel=0.2)
    assert buffer.returns.mean() == pytest.approx(1e4, rel=0.2)


def test_targets_and_old_quantiles_share_the_updates_scale() -> None:
    agent = collected(tiny_agent(critic={"value_clip": 0.2}))
    agent.move_return_scale()
    scale, buffer = agent.return_scale.snapshot, agent.rollout_buffer
    sequences = agent.sequences()
    old = sequences.old_quantiles.numpy() * scale.std + scale.mean
    raw = buffer.quantiles.reshape(2, 4, 8, 4, 8).swapaxes(1, 2).reshape(2, 8, 16, 8)
    np.testing.assert_allclose(old, raw, rtol=1e-4, atol=1e-4)


def test_old_quantiles_are_not_carried_along_where_nothing_is_clipped() -> None:
    assert collected(tiny_agent()).sequences().old_quantiles.shape == (2, 8, 16, 0)


def test_optimizer_memory_of_the_last_layers_follows_their_gradients() -> None:
    """On the same raw data, gradients before and after a change of unit keep their size, and so must the moments."""
    agent = tiny_agent(critic={"huber_kappa": 0.0}, return_scale={"max_change": None})
    agent.learn(4 * 128)
    collected(agent)
    layer = agent.policy.critics[0].head.last_layer

    def gradient() -> torch.Tensor:
        sequences = agent.sequences()
        agent.learner.vector.zero_gradients()
        critic = agent.policy.critics[0]
        outputs = critic(sequences.observations, sequences.layout(), sequences.critic_states[0])
        critic.head.loss(outputs, sequences.target, None).mean().backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    state = agent.randomness.targets.bit_generator.state
    before, old = gradient(), agent.return_scale.snapshot
    span = agent.learner.vector.where(layer.weight)
    moments = agent.learner.optimizer.state[agent.learner.vector.flat]
    kept = moments["exp_avg"][span].clone()
    new = Affine(old.mean + old.std, old.std * 4.0)
    agent.learner.follow_rescale(agent.policy.rescale_critics(old, new, first=False))
    agent.return_scale.snapshot = new
    agent.randomness.targets.bit_generator.state = state
    after = gradient()
    size = float(after.norm() / before.norm())
    assert size == pytest.approx(1.0, rel=0.02)
    torch.testing.assert_close(moments["exp_avg"][span], kept * round(size))


def test_switched_off_the_scale_stays_at_one() -> None:
    agent = tiny_agent(return_scale={"enabled": False})
    agent.learn(256)
    assert agent.return_scale.snapshot == (0.0, 1.0)
