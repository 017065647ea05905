"""Everything a user can set about the learner, in one frozen object."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, field_serializer, field_validator, model_validator

from tailguard.adversary import AdversaryConfig
from tailguard.configuration import (
    Config,
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Several,
    Threads,
    UnitInterval,
)
from tailguard.errors import ConfigError, InertSetting
from tailguard.normalization import ReturnScaleConfig
from tailguard.optim import VGSConfig
from tailguard.policy import CriticConfig
from tailguard.ppo.risk import RiskConfig
from tailguard.schedules import EntropyConfig, KLPenaltyConfig, Schedule, Scheduled, plain_schedule


class PPOConfig(Config):
    """Settings of `DistributionalPPO`; the names of SB3's RecurrentPPO where it has them."""

    removed = {"gradient_precision": ("float32", "gradients are float32 always.")}  # noqa: RUF012

    learning_rate: Scheduled = 1e-3
    """Step size: a number, a Schedule, or a function of the progress remaining (1 to 0) of each `learn`."""
    n_steps: PositiveInt = 128
    """Steps per environment and rollout."""
    batch_size: PositiveInt | None = None
    """Samples per gradient step, rounded to whole sequences; None is a quarter of the rollout."""
    microbatch_size: PositiveInt | None = None
    """Samples per backward pass, when a batch is too large for memory; gradients are those of the whole batch."""
    sequence_length: PositiveInt = 32
    """Steps per training sequence: how far gradients flow back in time. The default is cut to shorter rollouts."""
    n_epochs: Several = 8
    """Passes over each rollout."""
    gamma: Fraction = 0.99
    """Discount per step."""
    gae_lambda: UnitInterval = 0.95
    """Decay of the advantage trace, and of the horizon of critic targets."""
    clip_range: Scheduled = 0.2
    """How far the probability ratio may leave 1 before its gradient stops."""
    normalize_advantage: bool = True
    """Advantages to zero mean and unit std over the rollout's valid samples."""
    hindsight: bool = False
    """Take out of the advantages what the world's own moves explain; the environment says them as `exogenous`."""
    ent_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus at the start."""
    entropy: EntropyConfig = EntropyConfig()
    """How that weight changes."""
    vf_coef: PositiveFloat = 0.1
    """Weight of the value loss."""
    max_grad_norm: PositiveFloat = 0.5
    """Bound on the norm of the whole gradient."""
    target_kl: PositiveFloat | None = None
    """Stop an update after the epoch whose mean divergence exceeds this."""
    kl_penalty: KLPenaltyConfig = KLPenaltyConfig()
    """Adaptive penalty on the divergence."""
    critic: CriticConfig = CriticConfig()
    """The critics."""
    risk: RiskConfig = RiskConfig()
    """How the tail of the return enters the policy's objective."""
    adversary: AdversaryConfig | None = None
    """Who moves the observations while the policy learns; None: nobody."""
    return_scale: ReturnScaleConfig = ReturnScaleConfig()
    """The critics' unit."""
    optimizer: Literal["adam", "adamw", "upgd", "adaptive_upgd", "upgdw"] = "adam"
    """What turns gradients into steps."""
    optimizer_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further options of that optimizer, by its own names."""
    vgs: VGSConfig | None = None
    """Variance gradient scaling; None measures gradient noise and scales nothing."""
    ev_reserve: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.05
    """Share of sequences that never enter a gradient and on which explained variance is measured."""
    max_skipped_steps: PositiveInt = 10
    """Non-finite steps in a row after which training stops with an error."""
    update_threads: Threads | None = None
    """Threads of the native core that share an update, at most two for the actor and two per critic; None takes all
    cores this process may use. Results do not depend on it."""
    env_timeout: PositiveFloat = 60.0
    """Seconds without an answer after which the worker process of an environment is given up (SubprocVecEnv)."""
    torch_threads: Threads | None = 1
    """Threads of torch during training; more than one rarely pays for small networks. None leaves torch alone."""

    @field_validator("learning_rate", "clip_range", mode="before")
    @classmethod
    def schedules_of_sb3_are_numbers_where_they_can_be(cls, value: Any) -> Any:
        return plain_schedule(value)

    @field_validator("optimizer_kwargs", mode="before")
    @classmethod
    def what_a_bundle_can_hold(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        options = {name: option.item() if isinstance(option, np.generic) else option for name, option in value.items()}
        for name, option in options.items():
            parts = option if isinstance(option, list | tuple) else [option]
            if not all(part is None or isinstance(part, bool | int | float | str) for part in parts):
                raise ConfigError(
                    f"optimizer_kwargs: {name} is a {type(option).__name__}, which a bundle cannot hold. "
                    "Use numbers, text, or a list of them."
                )
        return options

    @model_validator(mode="after")
    def a_sequence_needs_two_steps(self) -> PPOConfig:
        if self.n_steps < 2:
            raise ConfigError(
                "n_steps=1 gives rollouts of a single step: memory receives no gradient through time and advantages "
                "see one reward. Use n_steps >= 2; 128 is the default."
            )
        return self

    def inert(self) -> Iterable[InertSetting]:
        if self.entropy.ent_coef_min > self.ent_coef:
            why = f"is above ent_coef={self.ent_coef!r}, where decay to it starts: lower it, or raise ent_coef."
            yield InertSetting("entropy.ent_coef_min", self.entropy.ent_coef_min, why, self.ent_coef, conditional=False)
        if self.sequence_length > self.n_steps > 1:
            why = f"is longer than a rollout of n_steps={self.n_steps}, which would cut it: lower it, or raise n_steps."
            if self.sequence_length != type(self).model_fields["sequence_length"].default:
                yield InertSetting("sequence_length", self.sequence_length, why, self.n_steps, conditional=False)
        if self.vgs is not None and not self.vgs.enabled:
            why = "scaling is switched off, so noise is only measured; use enabled=True"
            yield from (found.below("vgs") for found in self.vgs.unread(("alpha", "min_scaling_factor"), why))

    @field_serializer("learning_rate", "clip_range")
    def a_function_cannot_be_saved(self, value: Any) -> Any:
        if isinstance(value, Schedule):
            return value.model_dump()
        return "function" if callable(value) else value
