"""E1, G4, G5, H on real agents: optimizers and the gradient scaler inside the update."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tailguard.errors import ConfigError
from tests.agents import collected, logged, step_on, tiny_agent

ALL = ["adam", "adamw", "upgd", "adaptive_upgd", "upgdw"]


@pytest.mark.parametrize("optimizer", ALL)
def test_every_optimizer_moves_every_parameter_and_is_told_the_rate(optimizer: str) -> None:
    agent = collected(tiny_agent(optimizer=optimizer, learning_rate=2e-3))
    before = {name: p.detach().clone() for name, p in agent.policy.named_parameters()}
    agent.train()
    assert [name for name, p in agent.policy.named_parameters() if torch.equal(p, before[name])] == []
    assert agent.learner.optimizer.param_groups[0]["lr"] == 2e-3
    assert ("train/upgd_mean_gate" in logged(agent)) is ("upgd" in optimizer)


def test_steps_of_many_weights_on_several_threads_change_no_bit() -> None:
    weights = []
    for n_threads in (1, 3):
        large = {"lstm_hidden_size": 112, "net_arch": [32]}
        agent = collected(tiny_agent(optimizer="adaptive_upgd", update_threads=n_threads, policy_kwargs=large))
        agent.train()
        assert agent.learner.optimizer.n_threads == n_threads
        weights.append(agent.learner.vector.flat.detach())
    assert weights[0].numel() > 16 * 8192  # fewer are moved by one thread
    assert torch.equal(*weights)


def test_options_reach_the_optimizer_and_unknown_ones_are_refused() -> None:
    agent = tiny_agent(optimizer="adaptive_upgd", optimizer_kwargs={"sigma": 0.05, "gate": "minmax"})
    assert agent.learner.optimizer.param_groups[0]["sigma"] == 0.05
    with pytest.raises(ConfigError, match="optimizer_kwargs do not fit"):
        tiny_agent(optimizer="adam", optimizer_kwargs={"sigmma": 0.05})


def test_scaling_is_off_by_default_but_always_measured() -> None:
    agent = tiny_agent()
    agent.learn(3 * 128)
    figures = logged(agent)
    assert figures["vgs/scaling_factor"] == 1.0
    assert figures["vgs/step_count"] == agent.learner.gradient_scaler.step_count > 0
    assert figures["vgs/normalized_variance"] > 0.0


@pytest.mark.parametrize("optimizer", ["adam", "adaptive_upgd", "upgd"])
def test_a_factor_of_one_half_halves_the_step_whether_or_not_the_optimizer_is_scale_free(optimizer: str) -> None:
    def step_of(least: float) -> torch.Tensor:
        agent = collected(
            tiny_agent(
                optimizer=optimizer,
                optimizer_kwargs={"sigma": 0.0} if "upgd" in optimizer else {},
                max_grad_norm=1e9,
                vgs={"warmup_steps": 2, "alpha": 1e12, "min_scaling_factor": least},
            )
        )
        batch = agent.sequences()
        for part in np.array_split(np.arange(batch.n_sequences), 4):
            step_on(agent, batch.select(part))
        assert agent.learner.gradient_scaler.get_scaling_factor() == pytest.approx(least)
        agent.learner.optimizer.state.clear()  # both start the last step from fresh moments,
        generator = torch.Generator().manual_seed(0)
        agent.learner.vector.flat.data.copy_(torch.randn(agent.learner.vector.flat.shape, generator=generator) * 0.1)
        before = agent.learner.vector.flat.detach().clone()  # and from the same weights
        step_on(agent, batch)
        return agent.learner.vector.flat.detach() - before

    whole, half = step_of(1.0), step_of(0.5)
    assert float(half.norm() / whole.norm()) == pytest.approx(0.5, rel=1e-3)


def test_the_scaler_sees_the_raw_gradient_and_commits_only_steps_that_were_taken() -> None:
    agent = collected(tiny_agent(max_grad_norm=1e-6, vgs={"warmup_steps": 0}))
    batch, scaler = agent.sequences(), agent.learner.gradient_scaler
    step_on(agent, batch)
    assert scaler.step_count == 1
    assert agent.learner.vector.flat.grad is not None
    clipped = float(agent.learner.vector.flat.grad.norm())
    observed = float(scaler.statistics.state_dict()["mean"].norm())
    assert clipped == pytest.approx(1e-6, rel=1e-3)
    assert observed > 100 * clipped  # observed before clipping
    hook = agent.policy.actor.layers[0].weight.register_hook(lambda gradient: gradient * float("nan"))
    before = scaler.get_normalized_variance()
    step_on(agent, batch)
    assert scaler.step_count == 1  # the step was skipped, so nothing is committed
    assert scaler.get_normalized_variance() == before
    hook.remove()
    step_on(agent, batch)
    assert scaler.step_count == 2
