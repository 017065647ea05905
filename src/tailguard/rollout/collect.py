"""Collecting a rollout: the actor steps alone, and the critics judge what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from tailguard.errors import EnvContractError
from tailguard.loops import ALONE, Crew, call_all
from tailguard.normalization import Affine, ObservationStatistics
from tailguard.policy import RecurrentPolicy, State
from tailguard.rollout.advantages import advantages, successor_values, through_invalid
from tailguard.rollout.buffer import Floats, RolloutBuffer, all_finite, require_finite
from tailguard.rollout.contract import watched_step
from tailguard.rollout.opinions import Opinion, listener

StepHook = Callable[[dict[str, Any]], bool]
WORTH_A_CALL = 5e7  # weights times samples: less is not worth disturbing the acting thread for


@dataclass
class Live:
    """Where acting stands between two steps: all of it starts fresh on load, `set_env` and exploit."""

    observations: Floats
    starts: NDArray[np.bool_]
    actor_state: State
    critic_states: list[State]
    period_return: Floats  # (N,) X of the risk period so far
    period_steps: Floats  # (N,) its steps so far

    @classmethod
    def fresh(cls, policy: RecurrentPolicy, observations: Floats, starts: NDArray[np.bool_]) -> Live:
        n = len(starts)
        critics = [critic.trunk.memory.initial_state(n) for critic in policy.critic_list]
        return cls(observations, starts, policy.initial_state(n), critics, np.zeros(n), np.zeros(n))


@torch.inference_mode()
def collect_steps(
    env: VecEnv,
    policy: RecurrentPolicy,
    buffer: RolloutBuffer,
    live: Live,
    obs_stats: ObservationStatistics,
    generator: torch.Generator,
    hook: StepHook,
) -> list[Floats] | None:
    """Fill the buffer with T steps; returns the raw observations seen, or None when the hook stopped it.

    `hook` receives what a callback of SB3 may read, after each step, and says whether to go on.
    """
    raw_observations = []
    buffer.reset()
    acting, head = policy.acting(buffer.n_steps, buffer.n_envs, generator), policy.action_head
    step = watched_step(env)
    while not buffer.full:
        if np.count_nonzero(live.starts):
            live.actor_state = live.actor_state.keep(torch.from_numpy(~live.starts).float().to(policy.device))
        if buffer.position % buffer.sequence_length == 0:
            buffer.actor_states.append(live.actor_state)
        obs = policy.flat_array(live.observations)
        action, state = acting.act(buffer.position, obs, live.actor_state)
        new_obs, rewards, dones, infos = step(head.sent(action))
        raw = obs_stats.original()
        dones = check_step(new_obs if raw is None else raw, rewards, dones, buffer)
        t = buffer.add(obs, action, live.starts, rewards)
        note_episode_ends(buffer, t, dones, infos)
        mark_invalid(buffer, t, infos)
        if raw is not None:
            raw_observations.append(raw)
        live.observations, live.starts, live.actor_state = np.asarray(new_obs), dones, state
        if not hook({"new_obs": new_obs, "rewards": rewards, "dones": dones, "infos": infos, "n_steps": t + 1}):
            return None
    actions = torch.from_numpy(buffer.actions).to(policy.device)
    parameters = acting.parameters()
    buffer.log_probs[:] = head.log_prob(parameters, actions).numpy(force=True)
    buffer.modes[:] = head.mode(parameters).numpy(force=True)
    buffer.last_observations = policy.flat_array(live.observations)
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


class Judges:
    """The critics beside a rollout: they read its sequences as they are completed, and speak when it is finished.

    Everything is decoded with one scale and written in raw units (docs/algorithm.md, Algorithm 1, line 4). The critics
    do not hear each other: they may read and speak at the same time.
    """

    def __init__(self, policy: RecurrentPolicy, buffer: RolloutBuffer, live: Live, crew: Crew = ALONE) -> None:
        self.policy, self.buffer, self.live, self.crew = policy, buffer, live, crew
        features = policy.risk_value is not None
        parts = enumerate(zip(policy.critic_list, live.critic_states, strict=True))
        self.listeners = [listener(critic, buffer, state, features and c == 0) for c, (critic, state) in parts]
        self.reading: list[Callable[[], Any]] = []  # what there is to wait for
        self.announced = 0  # steps

    def __enter__(self) -> Judges:
        return self

    def __exit__(self, *_: object) -> None:
        """Nobody reads on when a rollout is broken off."""
        if not self.buffer.full:
            call_all(self.reading)

    def follow(self) -> None:
        """After a step: let somebody read the sequences that are complete, if they are worth the call."""
        buffer = self.buffer
        if buffer.position % buffer.sequence_length or buffer.full:  # the last one is left to `speak`
            return
        if (buffer.position - self.announced) * buffer.n_envs * self.listeners[0].n_weights >= WORTH_A_CALL:
            self.announced = buffer.position
            follow = [partial(critic.follow, self.announced) for critic in self.listeners]
            self.reading += [self.crew.begin(part) for part in follow]

    def speak(self, scale: Affine) -> None:
        """Quantiles of every step, of truncated ends, and of what follows."""
        buffer, live = self.buffer, self.live
        opinions: list[Opinion] = self.crew.run([partial(critic.conclude, live.starts) for critic in self.listeners])
        buffer.critic_states = [list(states) for states in zip(*(said.states for said in opinions), strict=True)]
        live.critic_states = [said.after for said in opinions]
        if self.policy.risk_value is not None:
            first = opinions[0]
            buffer.features = torch.cat([first.steps.features, first.follows.features.unsqueeze(0)])
            buffer.terminal_features = first.ends.features
        steps, ends, follows = ([part.quantiles for part in parts] for parts in list(zip(*opinions, strict=True))[2:])
        write_laws(self.policy, buffer, steps, ends, follows, scale)


@torch.inference_mode()
def write_laws(
    policy: RecurrentPolicy,
    buffer: RolloutBuffer,
    per_critic: list[Tensor],
    ends: list[Tensor],
    after: list[Tensor],
    scale: Affine,
) -> None:
    """Decode and aggregate: per-critic quantiles, the aggregated law and its mean, all in raw units."""
    buffer.quantiles = decode(torch.stack(per_critic), scale)
    buffer.law = decode(torch.cat([policy.aggregate(per_critic), policy.aggregate(after).unsqueeze(0)]), scale)
    end_law = decode(policy.aggregate(ends), scale)
    where = np.argwhere(buffer.truncated)
    buffer.terminal_law = {(int(t), int(n)): law for (t, n), law in zip(where, end_law, strict=True)}
    masses = policy.masses.numpy(force=True).astype(np.float64)
    buffer.values = buffer.law @ masses
    buffer.terminal_values = np.zeros_like(buffer.rewards)
    if len(where):
        buffer.terminal_values[where[:, 0], where[:, 1]] = end_law @ masses


def decode(normalized: Tensor, scale: Affine) -> Floats:
    """Normalized units to raw reward units, in place: a long rollout's laws are large."""
    raw: Floats = normalized.numpy(force=True)
    raw *= scale.std
    raw += scale.mean
    return raw


def estimate_advantages(buffer: RolloutBuffer, gamma: float, lam: float) -> None:
    """Fill advantages and lambda-returns, in raw units; every ingredient must be finite."""
    require_finite("value", buffer.values, "The critic diverged: lower the learning rate or load the last checkpoint.")
    require_finite("bootstrap value", buffer.terminal_values, "The critic diverged on a terminal observation.")
    successors = successor_values(buffer.values, buffer.terminal_values, buffer.terminated, buffer.truncated)
    trace = through_invalid(lam, buffer.valid)
    buffer.advantages = advantages(buffer.rewards, buffer.values, successors, buffer.dones, gamma, trace)
    require_finite("advantage", buffer.advantages, "Rewards are too large to be summed: scale them down.")
    buffer.returns = buffer.advantages + buffer.values[:-1]
