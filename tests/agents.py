"""Tiny real agents for tests: built, collected and updated in milliseconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnv

from tailguard import DistributionalPPO
from tailguard.health.metrics import Metric
from tailguard.ppo.update import batch_gradient, gradient_source, take_step
from tailguard.rollout import SequenceBatch
from tests.environments import cartpole

TINY: dict[str, Any] = {
    "n_steps": 32,
    "sequence_length": 8,
    "batch_size": 64,
    "n_epochs": 2,
    "critic": {"n_quantiles": 8},
}
TINY_POLICY: dict[str, Any] = {"lstm_hidden_size": 8, "net_arch": [8]}


def tiny_agent(env: VecEnv | None = None, policy: str = "MlpLstmPolicy", **settings: Any) -> DistributionalPPO:
    """An agent small enough that a whole update takes milliseconds."""
    policy_kwargs = {**TINY_POLICY, **settings.pop("policy_kwargs", {})}
    if policy == "MlpPolicy" or policy_kwargs.get("memory") == "none":
        policy_kwargs.pop("lstm_hidden_size", None)
    critic = {**TINY["critic"], **settings.pop("critic", {})}
    seed = settings.pop("seed", 0)
    merged = {**TINY, **settings, "critic": critic}
    return DistributionalPPO(policy, env or cartpole(4, seed), policy_kwargs=policy_kwargs, seed=seed, **merged)


def collected(agent: DistributionalPPO) -> DistributionalPPO:
    """The agent after one rollout, before any update; the rollout is in its buffer."""
    assert agent.env is not None
    _, callback = agent._setup_learn(10**6)
    callback.on_training_start({}, {})
    assert agent.collect_rollouts(agent.env, callback, agent.rollout_buffer, agent.config.n_steps)
    return agent


def logged(agent: DistributionalPPO) -> dict[str, Any]:
    """What the last update recorded."""
    logger: Logger = agent.logger
    return dict(logger.name_to_value)


def gradient_of(agent: DistributionalPPO, batch: SequenceBatch, micro_sequences: int | None = None) -> torch.Tensor:
    """The gradient one optimizer step on a batch would see, accumulated as the learner does it."""
    learner, everything = agent.learner, np.arange(batch.n_sequences)
    kept, learner.micro_sequences = learner.micro_sequences, micro_sequences
    batch_gradient(learner, batch, everything, gradient_source(learner, batch, agent.schedules()))
    learner.micro_sequences = kept
    return learner.vector.gradient.clone()


def step_on(agent: DistributionalPPO, batch: SequenceBatch) -> dict[Metric, float] | None:
    """One optimizer step on a batch; None where no sample is valid."""
    learner, schedules, everything = agent.learner, agent.schedules(), np.arange(batch.n_sequences)
    row = batch_gradient(learner, batch, everything, gradient_source(learner, batch, schedules))
    return None if row is None else take_step(learner, schedules, row)
