"""Where training stands between two updates, beyond the agent itself: acting, the environment, global random streams.

An agent that is loaded starts fresh episodes; one that is *resumed* goes on with these too. Environments that can save
themselves (`state_dict`, `load_state_dict`) go on in the middle of their episodes. For others episodes restart at
every checkpoint with seeds derived from (seed, step), whether or not the run was interrupted: both runs are the same.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.vec_env import VecEnv, VecNormalize

from tailguard.errors import EnvContractError, StateError
from tailguard.policy import RecurrentPolicy, State
from tailguard.ppo.bundle_checks import unsound
from tailguard.rollout.collect import RolloutState
from tailguard.stateful import Stateful, require_keys


def stateful_env(env: VecEnv | None) -> Stateful | None:
    """The environment that can save itself, below any VecNormalize (whose statistics are a part of the agent)."""
    while type(env) is VecNormalize:
        env = env.venv
    return env if isinstance(env, Stateful) else None


def derived_seed(root: int, step: int) -> int:
    """Seed of the episodes that start at a checkpoint."""
    return int(np.random.SeedSequence((root, step)).generate_state(1)[0] >> 2)


def live_state(live: RolloutState) -> dict[str, Any]:
    """Where acting stands, every field of it, as saved state."""
    return {field.name: plain(getattr(live, field.name)) for field in fields(live)}


def plain(value: Any) -> Any:
    """Arrays and recurrent states as lists of arrays and tensors."""
    return [plain(part) for part in value] if isinstance(value, list | tuple) else value


def restored_live(state: Mapping[str, Any], policy: RecurrentPolicy, n_envs: int) -> RolloutState:
    """The `RolloutState` that was saved, after its shapes have been compared with a fresh one's."""
    for problem in unsound(state, "live"):
        raise StateError(problem)
    observations = np.array(state["observations"])
    live = RolloutState.fresh(policy, observations, np.ones(n_envs, np.bool_))
    if set(state) != {field.name for field in fields(live)} or len(observations) != n_envs:
        raise StateError("The saved state of acting is another version's, or of another number of environments.")
    for field in fields(live):
        setattr(live, field.name, like(getattr(live, field.name), state[field.name]))
    return live


def like(fresh: Any, saved: Any) -> Any:
    """What was saved, in the form of a fresh value of the same shape."""
    if isinstance(fresh, list | tuple):
        if len(fresh) != len(saved):
            raise StateError("The saved memory does not fit this policy.")
        parts = [like(part, kept) for part, kept in zip(fresh, saved, strict=True)]
        return State(*parts) if isinstance(fresh, State) else parts
    if fresh.shape != saved.shape or (isinstance(fresh, torch.Tensor) and fresh.dtype != saved.dtype):
        raise StateError("The saved memory does not fit this policy and number of environments.")
    return saved if isinstance(fresh, torch.Tensor) else np.array(saved, fresh.dtype)


class GlobalRandomness:
    """The streams of `random`, numpy and torch that environments and callbacks may draw from."""

    def state_dict(self) -> dict[str, Any]:
        version, internal, gauss = random.getstate()
        kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002 (it is the global one we save)
        return {
            "python": [version, np.array(internal, np.uint32), gauss],
            "numpy": [str(kind), np.array(keys), int(position), int(has_gauss), float(cached)],
            "torch": torch.get_rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_keys(self, state)
        version, internal, gauss = state["python"]
        random.setstate((int(version), tuple(int(word) for word in internal), gauss))
        kind, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((kind, keys, position, has_gauss, cached))  # noqa: NPY002
        torch.set_rng_state(state["torch"])


def refuse_unfinished_numbers(observations: Any) -> None:
    """The first observations of fresh episodes must be finite, before anything sees them."""
    flat = np.asarray(observations).reshape(len(observations), -1)
    if not np.isfinite(flat).all():
        env, feature = (int(i) for i in np.argwhere(~np.isfinite(flat))[0])
        raise EnvContractError(
            f"observation is {flat[env, feature]} after reset in environment {env}, feature {feature}. "
            "The policy cannot see it and the normalizer would keep it for ever: fill or drop it in the environment."
        )
