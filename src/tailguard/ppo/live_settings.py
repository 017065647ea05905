"""What SB3's callbacks read and set on a model: attributes whose one home is the config.

What is set is checked and takes effect from the next update on, and is saved with the agent; what cannot change in an
agent that has been built raises an error that says what to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.utils import FloatSchedule

from tailguard.errors import ConfigError
from tailguard.policy import RecurrentPolicy
from tailguard.ppo.config import PPOConfig
from tailguard.ppo.learner import Learner
from tailguard.ppo.randomness import Randomness
from tailguard.ppo.renewal import renewed
from tailguard.ppo.settings import (
    config_from,
    refuse_batch_beyond_rollout,
    refuse_more_than_memory,
    sequences_per_batch,
)
from tailguard.rollout import RolloutBuffer
from tailguard.rollout.collect import estimate_advantages
from tailguard.schedules import EntropyCoefficient, plain_schedule

LIVE = (
    *("learning_rate", "clip_range", "n_steps", "batch_size", "microbatch_size", "sequence_length", "n_epochs"),
    *("gamma", "gae_lambda", "normalize_advantage", "ent_coef", "vf_coef", "max_grad_norm", "target_kl", "ev_reserve"),
)
"""Settings that an agent reads anew for every update; of its critics' settings, so are those that follow."""
LIVE_OF_CRITICS = ("value_clip", "value_clip_mode")


class Setting:
    """A setting of the config as an attribute of the agent, under the same name."""

    def __init__(self, read: Callable[[LiveSettings], Any] | None = None) -> None:
        """read: what the attribute gives, where that is not what the config holds"""
        self.read = read

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, agent: LiveSettings | None, owner: type) -> Any:
        if agent is None:
            return self
        return getattr(agent.config, self.name) if self.read is None else self.read(agent)

    def __set__(self, agent: LiveSettings, value: Any) -> None:
        if agent.built:  # before, SB3 only repeats what the config says
            agent.set_live(self.name, value)


class Fixed:
    """An attribute of SB3 that is read when an agent is built, and never again."""

    def __init__(self, advice: str) -> None:
        self.advice = advice

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, agent: LiveSettings | None, owner: type) -> Any:
        return self if agent is None else vars(agent).get(self.name)

    def __set__(self, agent: LiveSettings, value: Any) -> None:
        if agent.built and value != vars(agent).get(self.name):
            raise ConfigError(f"{self.name} of an agent that has been built cannot be set: {self.advice}.")
        vars(agent)[self.name] = value


class LiveSettings(OnPolicyAlgorithm):
    """SB3's attributes on top of one config.

    A config that is set as a whole, `model.config = model.config.replace(gamma=0.9)`, goes through the same checks.
    """

    policy: RecurrentPolicy  # type: ignore[assignment]
    rollout_buffer: RolloutBuffer  # type: ignore[assignment]
    learner: Learner
    entropy: EntropyCoefficient
    randomness: Randomness
    sized_for: PPOConfig  # batches
    estimated_with: tuple[float, float]  # discount and decay of the advantages in the buffer
    _config: PPOConfig

    learning_rate = Setting()
    clip_range = Setting(lambda agent: FloatSchedule(agent.config.clip_range))
    n_steps = Setting()
    batch_size = Setting(lambda agent: agent.samples_per_batch)
    microbatch_size = Setting()
    sequence_length = Setting()
    n_epochs = Setting()
    gamma = Setting()
    gae_lambda = Setting()
    normalize_advantage = Setting()
    ent_coef = Setting()
    vf_coef = Setting()
    max_grad_norm = Setting()
    target_kl = Setting()
    ev_reserve = Setting()
    optimizer = Setting()
    optimizer_kwargs = Setting()
    vgs = Setting()
    max_skipped_steps = Setting()
    update_threads = Setting()
    env_timeout = Setting()
    torch_threads = Setting()

    seed = Fixed("its random streams have begun; build another agent with it")
    policy_kwargs = Fixed("the networks are there; build another agent with it")
    use_sde = Fixed("state-dependent exploration is not available")
    sde_sample_freq = Fixed("state-dependent exploration is not available")
    rollout_buffer_class = Fixed("the rollout buffer is part of the algorithm")
    rollout_buffer_kwargs = Fixed("the rollout buffer is part of the algorithm")

    @property
    def built(self) -> bool:
        """Whether there is a learner whose settings can change."""
        return "learner" in vars(self)

    @property
    def config(self) -> PPOConfig:
        """All settings of the learner; the attributes above are views of it."""
        return self._config

    @config.setter
    def config(self, config: PPOConfig) -> None:
        if not self.built:
            self._config = config
            return
        self.refuse_fixed(config)
        refuse_batch_beyond_rollout(config, self.n_envs)
        refuse_more_than_memory(config, self.n_envs, self.policy.obs_features)
        self._config = self.learner.config = config
        self.entropy.initial = config.ent_coef
        self.policy.set_critic_config(config.critic)

    def set_live(self, name: str, value: Any) -> None:
        """Set one setting of an agent that has been built."""
        self.config = config_from(self.config, {name: value.item() if isinstance(value, np.generic) else value})

    def refuse_fixed(self, config: PPOConfig) -> None:
        """Refuse a config that differs from the agent's in what is built into it."""
        changed = [name for name in PPOConfig.model_fields if getattr(config, name) != getattr(self.config, name)]
        critic = {name: getattr(config.critic, name) for name in LIVE_OF_CRITICS}
        if "critic" in changed and self.config.critic.replace(**critic) == config.critic:
            changed.remove("critic")
        fixed = [name for name in changed if name not in LIVE]
        if fixed:
            names = " and ".join(fixed)
            raise ConfigError(
                f"{names} of an agent that has been built cannot be set: the learner is made of it. Save the agent and "
                f"load(path, env, {fixed[0]}=...), or build another one. These can be set at any time: "
                f"{', '.join(LIVE)}, clip_range_vf."
            )

    @property  # type: ignore[override]
    def lr_schedule(self) -> FloatSchedule:
        """The learning rate as a function of the progress remaining (1 to 0)."""
        return FloatSchedule(self.config.learning_rate)

    @lr_schedule.setter
    def lr_schedule(self, schedule: Any) -> None:
        if self.built:
            self.set_live("learning_rate", schedule)

    @property
    def clip_range_vf(self) -> FloatSchedule | None:
        """The range of value clipping, as SB3 gives it: a constant function, or None."""
        clip = self.config.critic.value_clip
        return None if clip is None else FloatSchedule(clip)

    @clip_range_vf.setter
    def clip_range_vf(self, value: Any) -> None:
        clip = plain_schedule(value)
        if clip is None:
            critic = self.config.critic.replace(value_clip=None, value_clip_mode="mean_only")
            self.config = self.config.replace(critic=critic)
        elif isinstance(clip, int | float):
            self.set_live("clip_range_vf", clip)
        else:
            raise ConfigError(
                f"clip_range_vf={value!r} changes with progress, which value clipping does not do. Set a number, in "
                "standard deviations of the return; a callback can set another one at any time."
            )

    @property
    def samples_per_batch(self) -> int | None:
        """Samples of a gradient step: those of the config, or what None stands for."""
        if self.config.batch_size is not None or not self.built:
            return self.config.batch_size
        return self.learner.batch_sequences * self.rollout_buffer.sequence_length

    # following

    def size_rollouts(self) -> None:
        """Buffer and batches for the current config and number of environments."""
        config, length = self.config, min(self.config.sequence_length, self.config.n_steps)
        refuse_batch_beyond_rollout(config, self.n_envs)
        extents = config.n_steps, self.n_envs, self.policy.obs_features, self.policy.action_head.action_dim, length
        there = vars(self).get("rollout_buffer")
        if there is None or (there.n_steps, there.n_envs, there.sequence_length) != (*extents[:2], length):
            refuse_more_than_memory(config, self.n_envs, self.policy.obs_features)
            self.rollout_buffer = RolloutBuffer(*extents)
        elif self.sized_for is config:
            return
        self.size_batches()

    def size_batches(self) -> None:
        """Batches for the current config and the rollout in the buffer, which an earlier config may have sized."""
        buffer, config = self.rollout_buffer, self.config
        shape = {"n_steps": buffer.n_steps, "sequence_length": buffer.sequence_length}
        if config.batch_size is not None:
            shape["batch_size"] = min(config.batch_size, buffer.n_steps * buffer.n_envs)
        _, batch, micro = sequences_per_batch(config.replace(**shape), buffer.n_envs)
        self.learner.batch_sequences, self.learner.micro_sequences = batch, micro
        self.sized_for = config

    def estimate_advantages(self) -> None:
        """Advantages and lambda-returns of the rollout, in raw units, with discount and decay as they are now."""
        self.estimated_with = self.config.gamma, self.config.gae_lambda
        estimate_advantages(self.rollout_buffer, *self.estimated_with)

    def follow_settings(self) -> None:
        """Take up what a callback set after the rollout was evaluated: one update sees one set of settings."""
        self.policy.refuse_what_nobody_calls()
        self.renew_learner()
        if self.sized_for is not self.config:
            self.size_batches()
        if self.estimated_with != (self.config.gamma, self.config.gae_lambda):
            self.estimate_advantages()

    def renew_learner(self) -> None:
        """Let the learner follow when somebody has replaced a module of the policy, or a parameter."""
        self.learner = renewed(self.learner, self.randomness.noise)
