"""From what a user typed to a checked config: SB3's names, nested settings, batches of whole sequences."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from gymnasium import spaces

from tailguard.configuration import Config
from tailguard.errors import ConfigError, InertSetting, did_you_mean
from tailguard.files import physical_memory
from tailguard.policy import PolicyConfig
from tailguard.policy.config import OF_GAUSSIANS
from tailguard.ppo.config import PPOConfig

NOT_HERE = {
    "use_sde": "state-dependent exploration is not available",
    "sde_sample_freq": "state-dependent exploration is not available",
    "rollout_buffer_class": "the rollout buffer is part of the algorithm",
    "rollout_buffer_kwargs": "the rollout buffer is part of the algorithm",
}
NOT_IN_POLICY = {
    "optimizer_class": "use optimizer=... of the algorithm",
    "optimizer_kwargs": "use optimizer_kwargs=... of the algorithm",
    "features_extractor_class": "wrap the environment instead",
    "features_extractor_kwargs": "wrap the environment instead",
    "lstm_kwargs": "use lstm_hidden_size and n_lstm_layers",
    "use_sde": "state-dependent exploration is not available",
}


LOG_STD_INIT_WITH_RISK = -2.0


def config_from(config: PPOConfig | Mapping[str, Any] | None, settings: Mapping[str, Any]) -> PPOConfig:
    """A config with the settings given as keywords on top; unknown names are refused with a did-you-mean."""
    base = config if isinstance(config, PPOConfig) else PPOConfig(**dict(config or {}))
    changes = dict(settings)
    for name, reason in NOT_HERE.items():
        if changes.pop(name, None) not in (None, False, -1, {}):
            raise ConfigError(f"{name} cannot be set: {reason}.")
    clip_range_vf = changes.pop("clip_range_vf", None)
    if clip_range_vf is not None:
        changes["critic"] = {**nested(base.critic, changes.get("critic")), "value_clip": clip_range_vf}
    for name, value in changes.items():
        if isinstance(value, Mapping) and name in PPOConfig.model_fields and name != "optimizer_kwargs":
            changes[name] = nested(getattr(base, name), value)
    unknown = [name for name in changes if name not in PPOConfig.model_fields and name not in PPOConfig.removed]
    if unknown:
        known = PPOConfig.model_fields
        hints = "".join(did_you_mean(name, known) for name in unknown)
        raise ConfigError(f"DistributionalPPO has no setting {', '.join(map(repr, unknown))}.{hints}")
    return base.replace(**changes)


def nested(base: Any, value: Any) -> dict[str, Any]:
    """A nested setting given in part, completed from what is there."""
    current = {name: getattr(base, name) for name in type(base).model_fields} if isinstance(base, Config) else {}
    return {**current, **dict(value or {})}


def policy_config_from(
    policy_name: str, policy_kwargs: Mapping[str, Any] | None, fears_risk: bool = False
) -> PolicyConfig:
    """`policy_kwargs`, checked; "MlpPolicy" has no memory, and a policy that fears risk explores less at first."""
    if policy_name not in ("MlpPolicy", "MlpLstmPolicy"):
        hint = did_you_mean(policy_name, ("MlpPolicy", "MlpLstmPolicy"))
        raise ConfigError(
            f'There is no policy {policy_name!r}.{hint} Use "MlpLstmPolicy", or "MlpPolicy" without memory.'
        )
    given = dict(policy_kwargs or {})
    for name, instead in NOT_IN_POLICY.items():
        if name in given and given.pop(name) not in (None, False, {}):
            raise ConfigError(f"policy_kwargs: {name} is not supported; {instead}.")
    if policy_name == "MlpPolicy":
        if given.get("memory") == "gru":
            raise ConfigError('policy_kwargs: memory="gru" does not go with "MlpPolicy". Use "MlpLstmPolicy".')
        given["memory"] = "none"
    if fears_risk:  # exploration as wide as the bounds is itself the tail: the policy would learn to fear acting
        given.setdefault("log_std_init", LOG_STD_INIT_WITH_RISK)
    return PolicyConfig(**given)


def inert_for_space(
    policy: PolicyConfig, config: PPOConfig, space: spaces.Space[Any]
) -> tuple[list[InertSetting], list[InertSetting]]:
    """Settings of the policy, and of the learner, that nothing reads where actions are choices and not numbers."""
    if isinstance(space, spaces.Box):
        return [], []
    why = f"actions of {space} have no spread and no bounds; use a Box"
    own = [found for found in policy.unread(OF_GAUSSIANS, why) if found[:2] != ("log_std_init", LOG_STD_INIT_WITH_RISK)]
    attack = [] if config.adversary is None else config.adversary.unread(("detach_std",), why)
    return own, [found.below("adversary") for found in attack]


def sequences_per_batch(config: PPOConfig, n_envs: int) -> tuple[int, int, int | None]:
    """Sequence length, sequences per batch, and sequences per micro-batch (None: the batch is not split)."""
    refuse_batch_beyond_rollout(config, n_envs)
    length = min(config.sequence_length, config.n_steps)
    total = config.n_steps * n_envs
    batch = whole_sequences(config.batch_size or max(total // 4, length), length, "batch_size", config.batch_size)
    if config.microbatch_size is None:
        return length, batch, None
    return length, batch, whole_sequences(config.microbatch_size, length, "microbatch_size", config.microbatch_size)


def refuse_batch_beyond_rollout(config: PPOConfig, n_envs: int) -> None:
    """A batch holds samples of one rollout."""
    total = config.n_steps * n_envs
    if config.batch_size is not None and config.batch_size > total:
        raise ConfigError(
            f"batch_size={config.batch_size} is more than the {total} samples of a rollout "
            f"(n_steps={config.n_steps} x {n_envs} environments). Lower batch_size or raise n_steps."
        )


def refuse_more_than_memory(config: PPOConfig, n_envs: int, n_features: int) -> None:
    """A rollout that cannot fit into memory is a typing error or a hostile file: said before anything is allocated."""
    numbers = n_features + 2 * config.critic.n_quantiles * (2 if config.critic.twin else 1) + 16
    needed, there = 4 * config.n_steps * n_envs * numbers, physical_memory()
    if needed > there:
        raise ConfigError(
            f"n_steps={config.n_steps} with {n_envs} environments needs about {needed / 2**30:,.0f} GiB a rollout, "
            f"this machine has {there / 2**30:,.0f}. Lower n_steps or the number of environments."
        )


def whole_sequences(samples: int, length: int, name: str, given: int | None) -> int:
    """Samples as whole sequences, with a notice when a number that was given had to be rounded."""
    count = max(round(samples / length), 1)
    if given is not None and count * length != given:
        warnings.warn(
            f"{name}={given} is not a whole number of sequences of {length} steps; {count * length} is used. "
            f"Choose a multiple of sequence_length.",
            stacklevel=4,
        )
    return count


def settings_of(custom_objects: Mapping[str, Any] | None) -> dict[str, Any]:
    """SB3's replacements at load as settings. There, too, `learning_rate` wins over the schedule made of it."""
    given = dict(custom_objects or {})
    if "lr_schedule" in given:
        given.setdefault("learning_rate", given.pop("lr_schedule"))
    return {name: value for name, value in given.items() if name != "lr_schedule"}


RISK_UNITS_ONCE = 64
"""Of bundles from before there was a setting."""


def restorable(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The saved config, after functions that cannot be saved have been given anew."""
    for name in ("learning_rate", "clip_range"):
        if config.get(name) == "function" and name not in settings:
            warnings.warn(
                f"{name} was a Python function, which a bundle cannot hold; the default is used. "
                f"Pass {name}=... to load, or train with a tailguard.schedules.Schedule.",
                stacklevel=3,
            )
    risk = config.get("risk", {})
    if risk.get("mode") == "episode":
        risk = {"units": RISK_UNITS_ONCE} | risk
    return {name: value for name, value in config.items() if value != "function"} | {"risk": risk}
