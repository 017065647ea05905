"""Saving an agent whole and reading it back: everything walks `parts()`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize

from tailguard.checkpoint import read_bundle, write_bundle
from tailguard.errors import ConfigError, StateError
from tailguard.normalization import ObservationStatistics, refuse_two_return_scales
from tailguard.policy import PolicyConfig
from tailguard.ppo.config import PPOConfig
from tailguard.ppo.randomness import Randomness
from tailguard.ppo.settings import config_from
from tailguard.ppo.spaces import build_space, describe_space
from tailguard.rollout.collect import Live
from tailguard.stateful import Stateful


class BundledAlgorithm(OnPolicyAlgorithm):
    """SB3's save, load and parameter exchange on top of one dictionary of parts."""

    config: PPOConfig
    policy_name: str
    policy_config: PolicyConfig
    obs_stats: ObservationStatistics
    randomness: Randomness
    live: Live | None
    n_reserve_all_masked: int

    def parts(self) -> dict[str, Stateful]:
        raise NotImplementedError

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """Go on in another environment of the same spaces; memory and episodes start fresh."""
        normalizer = unwrap_vec_normalize(env) if isinstance(env, VecEnv) else None
        refuse_two_return_scales(normalizer, self.config.return_scale)
        kept = self.obs_stats.state_dict()
        super().set_env(env, force_reset)
        self.obs_stats = ObservationStatistics(self._vec_normalize_env)
        if kept["present"]:
            self.obs_stats.load_state_dict(kept)
        self.live = None

    def get_parameters(self, include_optimizer: bool = True) -> dict[str, dict[str, Any]]:
        """State of policy, optimizer and controllers by name, as in SB3."""
        named = self.named_parameters()
        return {name: dict(part.state_dict()) for name, part in named.items() if include_optimizer or name == "policy"}

    def named_parameters(self) -> dict[str, Stateful]:
        """The parts that `get_parameters` and `set_parameters` exchange, under SB3's names."""
        renamed = {"optimizer": "policy.optimizer"}
        chosen = ("policy", "optimizer", "gradient_scaler", "kl_penalty")
        return {renamed.get(name, name): part for name, part in self.parts().items() if name in chosen}

    def set_parameters(
        self, load_path_or_dict: Any, exact_match: bool = True, device: torch.device | str = "auto"
    ) -> None:
        """Load what `get_parameters` gave, or the same parts of a saved agent. `exact_match` asks for all of them."""
        named = self.named_parameters()
        if isinstance(load_path_or_dict, Mapping):
            states = dict(load_path_or_dict)
        else:
            saved = read_bundle(load_path_or_dict)[0]["parts"]
            states = {{"optimizer": "policy.optimizer"}.get(name, name): state for name, state in saved.items()}
            states = {name: state for name, state in states.items() if name in named}
        unknown, missing = set(states) - set(named), set(named) - set(states)
        if unknown or (exact_match and missing):
            raise StateError(
                f"set_parameters got {sorted(states)}; unknown {sorted(unknown)}, missing {sorted(missing)}. "
                "Pass all of get_parameters(), or exact_match=False for a part of them."
            )
        for name, state in states.items():
            named[name].load_state_dict(state)

    def save(self, path: Any, exclude: Any = None, include: Any = None) -> None:
        """Write the whole agent to the directory `path`; `exclude` and `include` have nothing to choose from."""
        if not isinstance(path, str | Path):
            raise ConfigError(
                f"save needs a path for a directory, not a {type(path).__name__}: a bundle is several files."
            )
        state = {name: part.state_dict() for name, part in self.parts().items()}
        agent = {
            "observation_space": describe_space(self.observation_space),
            "action_space": describe_space(self.action_space),
            "n_envs": self.n_envs,
            "parts": state,
        }
        about = {
            "policy": self.policy_name,
            "config": self.config.model_dump(mode="json"),
            "policy_config": self.policy_config.model_dump(mode="json"),
            "seed": self.randomness.root,
            "num_timesteps": self.num_timesteps,
        }
        write_bundle(path, agent, about)

    @classmethod
    def load(
        cls,
        path: Any,
        env: GymEnv | None = None,
        device: torch.device | str = "cpu",
        custom_objects: Any = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **settings: Any,
    ) -> Self:
        """Read an agent from the directory `path`; further keywords override its settings. Nothing is unpickled."""
        tree, manifest = read_bundle(path)
        verbose = settings.pop("verbose", 0)
        tensorboard_log = settings.pop("tensorboard_log", None)
        model = cls(  # type: ignore[call-arg]
            manifest["policy"],
            None,  # type: ignore[arg-type]
            config=config_from(restorable(manifest["config"], settings), settings),
            policy_kwargs=manifest["policy_config"],
            seed=manifest["seed"],
            device=device,
            verbose=verbose,
            tensorboard_log=tensorboard_log,
            _init_setup_model=False,
        )
        model.observation_space = build_space(tree["observation_space"])
        model.action_space = build_space(tree["action_space"])
        model.n_envs = int(tree["n_envs"])
        statistics = tree["parts"]["obs_stats"]
        if env is not None:
            model.attach(env, statistics)
        model._setup_model()
        model.load_parts(tree["parts"], optional=() if env is not None else ("obs_stats",))
        return model

    def attach(self, env: GymEnv, statistics: Mapping[str, Any]) -> None:
        """Take an environment at load; one without VecNormalize is wrapped when the agent was trained with it."""
        wrapped = self._wrap_env(env, self.verbose)
        if statistics["present"] and unwrap_vec_normalize(wrapped) is None:
            wrapped = VecNormalize(wrapped, norm_reward=False)
        self.n_envs = wrapped.num_envs
        super().set_env(wrapped)

    def load_parts(self, states: Mapping[str, Any], optional: tuple[str, ...] = ()) -> None:
        """Load every part strictly by name; memory and episodes start fresh."""
        parts = self.parts()
        if set(states) != set(parts):
            missing, extra = sorted(set(parts) - set(states)), sorted(set(states) - set(parts))
            raise StateError(f"The saved agent's parts do not fit: missing {missing}, unknown {extra}.")
        for name, part in parts.items():
            if name not in optional:
                part.load_state_dict(states[name])
        self._last_obs, self.live = None, None


class Progress:
    """The counters SB3 keeps on the algorithm."""

    NAMES = ("num_timesteps", "_total_timesteps", "_num_timesteps_at_start", "_episode_num", "_n_updates")

    def __init__(self, algorithm: BundledAlgorithm) -> None:
        self.algorithm = algorithm

    def state_dict(self) -> dict[str, Any]:
        counters: dict[str, Any] = {name: int(getattr(self.algorithm, name)) for name in self.NAMES}
        counters["progress_remaining"] = float(self.algorithm._current_progress_remaining)
        counters["n_reserve_all_masked"] = self.algorithm.n_reserve_all_masked
        return counters

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.NAMES:
            setattr(self.algorithm, name, int(state[name]))
        self.algorithm._current_progress_remaining = float(state["progress_remaining"])
        self.algorithm.n_reserve_all_masked = int(state["n_reserve_all_masked"])


def restorable(config: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The saved config, after functions that cannot be saved have been given anew."""
    for name in ("learning_rate", "clip_range"):
        if config.get(name) == "function" and name not in settings:
            warnings.warn(
                f"{name} was a Python function, which a bundle cannot hold; the default is used. "
                f"Pass {name}=... to load, or train with a tailguard.schedules.Schedule.",
                stacklevel=3,
            )
    return {name: value for name, value in config.items() if value != "function"}
