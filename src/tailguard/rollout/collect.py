"""Collecting a rollout: the actor steps alone; the critics evaluate what it did afterwards (rollout/evaluate.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv

from tailguard.errors import EnvContractError
from tailguard.normalization import ObservationStatistics
from tailguard.policy import RecurrentPolicy, State
from tailguard.policy.native import arrays_of, loaded_trunk
from tailguard.rollout.advantages import advantages, successor_values, through_invalid
from tailguard.rollout.buffer import Floats, RolloutBuffer, all_finite, require_finite
from tailguard.rollout.contract import watched_step

StepHook = Callable[[dict[str, Any]], bool]


@dataclass
class RolloutState:
    """Where acting stands between two steps: all of it starts fresh on load, `set_env` and exploit."""

    observations: Floats
    starts: NDArray[np.bool_]
    actor_state: State
    critic_states: list[State]
    period_return: Floats  # (N,) X of the risk period so far
    period_steps: Floats  # (N,) its steps so far

    @classmethod
    def fresh(cls, policy: RecurrentPolicy, observations: Floats, starts: NDArray[np.bool_]) -> RolloutState:
        n = len(starts)
        critics = [critic.trunk.memory.initial_state(n) for critic in policy.critic_list]
        return cls(observations, starts, policy.initial_state(n), critics, np.zeros(n), np.zeros(n))


@torch.inference_mode()
def collect_steps(
    env: VecEnv,
    policy: RecurrentPolicy,
    buffer: RolloutBuffer,
    state: RolloutState,
    obs_stats: ObservationStatistics,
    generator: torch.Generator,
    hook: StepHook,
) -> list[Floats] | None:
    """Fill the buffer with T steps; returns the raw observations seen, or None when the hook stopped it.

    All randomness of the actions is drawn at once. `hook` receives what a callback of SB3 may read, after each step,
    and says whether to go on.
    """
    buffer.reset()
    head, step, raw_observations, parameters = policy.action_head, watched_step(env), [], []
    noise = head.noise((buffer.n_steps, buffer.n_envs), generator).to(policy.device)
    native = loaded_trunk(policy.actor, head.last_layer) if policy.why_torch_acts() is None else None
    if native is not None:
        outputs = np.empty((*buffer.rewards.shape, head.last_layer.out_features), np.float32)
        noise_array = noise.numpy()
    while not buffer.full:
        t = buffer.position
        if np.count_nonzero(state.starts):
            state.actor_state = state.actor_state.keep(torch.from_numpy(~state.starts).float().to(policy.device))
        if t % buffer.sequence_length == 0:
            buffer.actor_states.append(state.actor_state)
        obs = policy.flat_array(state.observations)
        if native is not None:
            after = state.actor_state.copy()  # an environment may break off: until it has answered, nothing moves
            native.step(obs, *arrays_of(after), outputs[t])
            action = head.sample_array(outputs[t], noise_array[t])
        else:
            distribution, after = policy.action_step(policy.flat(obs), state.actor_state)
            parameters.append(distribution)
            action = head.sample(distribution, noise[t]).numpy(force=True)
        new_obs, rewards, dones, infos = step(head.to_env(action))
        raw = obs_stats.original()
        dones = check_step(new_obs if raw is None else raw, rewards, dones, buffer)
        buffer.add(obs, action, state.starts, rewards)
        note_episode_ends(buffer, t, dones, infos)
        mark_invalid(buffer, t, infos)
        if raw is not None:
            raw_observations.append(raw)
        state.observations, state.starts, state.actor_state = np.asarray(new_obs), dones, after
        if not hook({"new_obs": new_obs, "rewards": rewards, "dones": dones, "infos": infos, "n_steps": t + 1}):
            return None
    acted = head.distribution(torch.from_numpy(outputs)) if native is not None else torch.stack(parameters)
    buffer.log_probs[:] = head.log_prob(acted, torch.from_numpy(buffer.actions).to(policy.device)).numpy(force=True)
    buffer.modes[:] = head.mode(acted).numpy(force=True)
    buffer.last_observations = policy.flat_array(state.observations)
    return raw_observations


def check_step(obs: Any, rewards: Any, dones: Any, buffer: RolloutBuffer) -> NDArray[np.bool_]:
    """The environment's contract, before any state changes; returns dones as a checked array.

    obs: before normalization
    """
    n, t = buffer.n_envs, buffer.position
    ended: NDArray[np.bool_] = np.asarray(dones)
    rewards = np.asarray(rewards)
    if ended.shape != (n,) or ended.dtype != np.bool_:
        raise EnvContractError(
            f"dones has shape {ended.shape} and type {ended.dtype}; expected shape ({n},) and bool, "
            "one per environment. Return np.array([...], dtype=bool) from the VecEnv's step."
        )
    if rewards.shape != (n,):
        raise EnvContractError(f"rewards has shape {rewards.shape}; expected ({n},), one number per environment.")
    require_finite("reward", rewards[None], "Check the environment's reward.", first_step=t)
    seen = np.asarray(obs)
    if not all_finite(seen):
        flat = seen.reshape(n, -1)
        env, feature = (int(i) for i in np.argwhere(~np.isfinite(flat))[0])
        raise EnvContractError(
            f"observation is {flat[env, feature]} at step {t} of the rollout in environment {env}, feature {feature}. "
            "The policy cannot see it and the normalizer would keep it for ever: fill or drop it in the environment."
        )
    return ended


def note_episode_ends(buffer: RolloutBuffer, t: int, dones: NDArray[np.bool_], infos: list[dict[str, Any]]) -> None:
    """Keep termination and truncation apart, and the last observation of truncated episodes."""
    for n in dones.nonzero()[0]:
        info = infos[n]
        if not info.get("TimeLimit.truncated", False):
            buffer.terminated[t, n] = True
            continue
        last = info.get("terminal_observation")
        if last is None:
            raise EnvContractError(
                f"Environment {n} says TimeLimit.truncated at step {t} of the rollout but gives no "
                "terminal_observation, so the value after the cut is unknown. Put it into that step's info."
            )
        if not np.isfinite(last).all():
            raise EnvContractError(f"terminal_observation of environment {n} at step {t} of the rollout is not finite.")
        buffer.truncated[t, n] = True
        buffer.terminal_observations[t, int(n)] = np.asarray(last, np.float32).reshape(-1)


def mark_invalid(buffer: RolloutBuffer, t: int, infos: list[dict[str, Any]]) -> None:
    """Take the samples of step t out of the update where an environment's info says `valid=False`."""
    for n, info in enumerate(infos):
        if "valid" in info:
            valid = info["valid"]
            if not isinstance(valid, bool | np.bool_):
                raise EnvContractError(
                    f'info["valid"] of environment {n} at step {t} of the rollout is {valid!r}; expected True or '
                    "False: whether the step may be learned from. Return a bool, or leave the key out."
                )
            buffer.valid[t, n] = valid


def estimate_advantages(buffer: RolloutBuffer, gamma: float, lam: float) -> None:
    """Fill advantages and lambda-returns, in raw units; every ingredient must be finite."""
    require_finite("value", buffer.values, "The critic diverged: lower the learning rate or load the last checkpoint.")
    require_finite("bootstrap value", buffer.terminal_values, "The critic diverged on a terminal observation.")
    successors = successor_values(buffer.values, buffer.terminal_values, buffer.terminated, buffer.truncated)
    trace = through_invalid(lam, buffer.valid)
    buffer.advantages = advantages(buffer.rewards, buffer.values, successors, buffer.dones, gamma, trace)
    require_finite("advantage", buffer.advantages, "Rewards are too large to be summed: scale them down.")
    buffer.returns = buffer.advantages + buffer.values[:-1]
