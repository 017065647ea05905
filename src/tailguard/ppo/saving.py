"""Saving an agent whole and reading it back: everything walks `parts()`."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from stable_baselines3.common.type_aliases import GymEnv
from stable_baselines3.common.utils import get_system_info
from stable_baselines3.common.vec_env import VecEnv, VecNormalize, unwrap_vec_normalize

from tailguard.checkpoint import read_bundle, write_bundle
from tailguard.configuration import saved_config, warn_of_inert, with_value
from tailguard.errors import ConfigError, StateError
from tailguard.normalization import ObservationStatistics, refuse_two_return_scales
from tailguard.policy import PolicyConfig, RecurrentPolicy
from tailguard.ppo.bundle_checks import (
    refuse_misfit,
    refuse_to_write_unsound,
    refuse_unsound,
    refusing,
    shapes_of,
)
from tailguard.ppo.config import PPOConfig
from tailguard.ppo.fingerprint import fingerprint, warn_of_another_machine
from tailguard.ppo.migrations import migrate
from tailguard.ppo.own_policies import class_name, freeze_as_saved, frozen_names, refuse_other_class
from tailguard.ppo.parameters import ParameterExchange
from tailguard.ppo.session import (
    GlobalRandomness,
    derived_seed,
    live_state,
    refuse_unfinished_numbers,
    restored_live,
    stateful_env,
)
from tailguard.ppo.settings import config_from, inert_for_space, restorable, settings_of
from tailguard.ppo.spaces import build_space, describe_space
from tailguard.rollout.collect import RolloutState
from tailguard.rollout.workers import watch_workers
from tailguard.stateful import require_keys


class BundledAlgorithm(ParameterExchange):
    """SB3's save and load on top of one dictionary of parts."""

    policy: RecurrentPolicy  # type: ignore[assignment]
    policy_name: str
    policy_config: PolicyConfig
    live: RolloutState | None
    in_update: bool
    n_reserve_all_masked: int
    saved_at: Path | None = None
    """The bundle that was last written, or that it came from."""

    def build_policy(self) -> RecurrentPolicy:
        """The networks of this configuration, fresh; of the same shapes as those of every agent it describes."""
        kind: type[RecurrentPolicy] = self.policy_class  # type: ignore[assignment]
        spaces, units = (self.observation_space, self.action_space), self.config.risk.value_units
        return kind(*spaces, self.policy_config, self.config.critic, risk_units=units)

    def set_env(self, env: GymEnv, force_reset: bool = True) -> None:
        """Go on in another environment of the same spaces; memory and episodes start fresh."""
        normalizer = unwrap_vec_normalize(env) if isinstance(env, VecEnv) else None
        refuse_two_return_scales(normalizer, self.config.return_scale)
        kept = self.obs_stats.state_dict()
        super().set_env(env, force_reset)
        watch_workers(self.env, self.config.env_timeout)
        self.obs_stats = ObservationStatistics(self._vec_normalize_env)
        if kept["present"]:
            self.obs_stats.load_state_dict(kept)
        self.live = None

    def save(self, path: Any, exclude: Any = None, include: Any = None) -> None:
        """Write the whole agent to the directory `path`.

        `exclude` may name what is not part of a bundle, `include` what is: nothing else can be chosen.
        """
        self.refuse_to_choose(exclude or (), include or ())
        self.write(path, None, {})

    def refuse_to_choose(self, exclude: Iterable[str], include: Iterable[str]) -> None:
        """A bundle is one agent, whole: what was asked for in vain is said, not ignored."""
        never = {name for name in self._excluded_save_params() if name not in self.parts()}
        left_out = sorted(set(exclude) - never)
        if left_out:
            raise ConfigError(
                f"save(exclude={left_out}): a bundle holds the whole agent, because without a part of it none could be "
                f"loaded. Leave exclude out; {', '.join(sorted(never))} are never in a bundle, and get_parameters() "
                "gives weights alone."
            )
        held = {*self.parts(), *type(self.config).model_fields, *HELD}
        asked = sorted(set(include) - held)
        if asked:
            raise ConfigError(
                f"save(include={asked}): a bundle holds an agent and nothing else. Keep what belongs to your program "
                "in a file of its own, or in the manifest by checkpoint(path, about={...}); load takes environments."
            )

    def checkpoint(self, path: str | Path, about: Mapping[str, Any] | None = None, scheduled: bool = True) -> None:
        """Write the agent and where its training stands, so that `resume` goes on exactly; between two updates only.

        An environment that cannot save itself restarts its episodes here when the checkpoint is `scheduled`, that is,
        when an uninterrupted run writes it too. `about` goes into the manifest.
        """
        if self.in_update:
            raise StateError(
                "A checkpoint can only be written between two updates: after learn(), or in a callback's "
                "_on_rollout_start. In the middle of one, save(path) writes the agent alone."
            )
        self.write(path, self.session(scheduled), about or {})
        if scheduled and stateful_env(self.env) is None:
            self.restart_episodes()

    def write(self, path: Any, session: Mapping[str, Any] | None, about: Mapping[str, Any]) -> None:
        """One bundle: parts, spaces, session, and a manifest that says what it is."""
        if not isinstance(path, str | Path):
            raise ConfigError(
                f"save needs a path for a directory, not a {type(path).__name__}: a bundle is several files."
            )
        parts = {name: part.state_dict() for name, part in self.parts().items()}
        refuse_to_write_unsound(parts)
        agent = {
            "observation_space": describe_space(self.observation_space),
            "action_space": describe_space(self.action_space),
            "n_envs": self.n_envs,
            "parts": parts,
            "session": session,
        }
        written = {
            "policy": self.policy_name,
            "config": self.config.model_dump(mode="json"),
            "policy_config": self.policy_config.model_dump(mode="json"),
            "seed": self.randomness.root,
            "num_timesteps": self.num_timesteps,
            "exact": session is not None,
            "fingerprint": fingerprint(),
            "frozen": frozen_names(self.policy),
            "policy_class": class_name(type(self.policy)),
        }
        self.saved_at = write_bundle(path, agent, {**about, **written})

    def session(self, scheduled: bool) -> dict[str, Any] | None:
        """Where training stands; None when the environment cannot say and nothing restarts here."""
        env = stateful_env(self.env)
        if env is None or self.live is None:
            return {"restart": True} if scheduled else None
        return {
            "restart": False,
            "live": live_state(self.live),
            "environment": env.state_dict(),
            "global_rng": GlobalRandomness().state_dict(),
        }

    def restart_episodes(self) -> None:
        """Fresh episodes and memory, seeded by (seed, step): the same whether or not the run was interrupted."""
        if self.env is None:
            raise ConfigError("There is no environment whose episodes could start. Give one with set_env(env).")
        self.set_random_seed(derived_seed(self.randomness.root, self.num_timesteps))
        with self.obs_stats.frozen():
            self._last_obs = self.env.reset()  # type: ignore[assignment]
        self.start_live()

    def start_live(self) -> None:
        """Fresh memory at the start of every environment's episode."""
        observations = np.asarray(self._last_obs)
        refuse_unfinished_numbers(observations)
        self._last_episode_starts = np.ones(self.n_envs, np.bool_)
        self.live = RolloutState.fresh(self.policy, observations, np.ones(self.n_envs, np.bool_))

    @classmethod
    def load(
        cls,
        path: Any,
        env: GymEnv | None = None,
        device: torch.device | str = "cpu",
        custom_objects: Mapping[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        **settings: Any,
    ) -> Self:
        """Read an agent from the directory `path`; further keywords override its settings. Nothing is unpickled.

        `custom_objects` are settings under the names that SB3 has for them, and `policy_class`, a policy of your own
        with which the agent was trained. What was frozen (`requires_grad_(False)`) is frozen again. Memory and episodes
        start fresh; `resume` goes on where a checkpoint was written.
        """
        if not force_reset:
            raise ConfigError(
                "load(force_reset=False): a loaded agent starts fresh episodes. Use resume(path, env) for an agent "
                "that was written by checkpoint(), or leave force_reset out."
            )
        if print_system_info:
            get_system_info()
        return cls.read(path, env, device, {**settings_of(custom_objects), **settings})[0]

    @classmethod
    def resume(
        cls,
        path: Any,
        env: GymEnv,
        device: torch.device | str = "cpu",
        custom_objects: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Self:
        """Go on exactly where `checkpoint` was written, in an environment built as the first one was.

        Train on with `learn(total - agent.num_timesteps, reset_num_timesteps=False)`.
        """
        model, tree, manifest = cls.read(path, env, device, {**settings_of(custom_objects), **settings})
        warn_of_another_machine(path, manifest)
        with refusing(path, "the state of a training"):
            session = tree["session"]
        if session is None:
            warnings.warn(
                f"{path} does not say where its episodes stood: they start afresh, and the resumed run is not exact.",
                stacklevel=2,
            )
            return model
        model.go_on(session, path)
        return model

    def go_on(self, session: Mapping[str, Any], path: Any) -> None:
        """Take up acting, the environment and the global random streams."""
        with refusing(path, "the state of a training"):
            restart = bool(session["restart"])
        if restart:
            self.restart_episodes()
            return
        env = stateful_env(self.env)
        if env is None or self.env is None:
            raise StateError(
                f"{path} was written in the middle of episodes, and this environment cannot load its state. "
                "Give the environment the run was started with, or use load(path, env) for fresh episodes."
            )
        with self.obs_stats.frozen():
            self.env.reset()  # uses up seeds that are waiting; the state follows
        with refusing(path, "the state of a training"):
            self.live = restored_live(session["live"], self.policy, self.n_envs)
            environment, streams = session["environment"], session["global_rng"]
            GlobalRandomness().load_state_dict(streams)
        env.load_state_dict(environment)  # says itself when it was saved on other data
        self._last_obs, self._last_episode_starts = self.live.observations, self.live.starts

    @classmethod
    def read(
        cls, path: Any, env: GymEnv | None, device: torch.device | str, settings: dict[str, Any]
    ) -> tuple[Self, dict[str, Any], dict[str, Any]]:
        """The agent of a bundle, the bundle's tree and its manifest."""
        tree, manifest = read_bundle(path)
        given = dict(settings)
        spaces_given = {name: given.pop(name) for name in ("observation_space", "action_space") if name in given}
        policy_class = given.pop("policy_class", None)
        verbose, tensorboard_log = given.pop("verbose", 0), given.pop("tensorboard_log", None)
        with refusing(path, "an agent"):
            saved = saved_config(PPOConfig, restorable(manifest["config"], given), path)
            policy_config = saved_config(PolicyConfig, manifest["policy_config"], path)
        config = config_from(saved, given)
        with refusing(path, "an agent"):
            model = cls(  # type: ignore[call-arg]
                policy_class or manifest["policy"],
                None,  # type: ignore[arg-type]
                config=config,
                policy_kwargs=policy_config.model_dump(),
                seed=int(manifest["seed"]),
                device=device,
                verbose=verbose,
                tensorboard_log=tensorboard_log,
                _init_setup_model=False,
            )
            refuse_other_class(manifest, model.policy_class, policy_class)
            model.policy_name = manifest["policy"]
            model.observation_space = build_space(tree["observation_space"])
            model.action_space = build_space(tree["action_space"])
            for name, space in spaces_given.items():
                if space != getattr(model, name):
                    raise ConfigError(
                        f"{name}={space} was given, but its networks are made for {getattr(model, name)}."
                    )
            model.n_envs = int(tree["n_envs"])
            if model.n_envs < 1:
                raise StateError(f"n_envs is {model.n_envs}.")
            model.drop_inert_for_space(path)
            refuse_misfit(shapes_of(model.build_policy), tree["parts"]["policy"])
            statistics = dict(tree["parts"]["obs_stats"])
        if env is not None:
            model.attach(env, statistics)
        with refusing(path, "an agent"):
            model._setup_model()
            freeze_as_saved(model.policy, manifest)
            migrate(tree, manifest["schema_version"], model.parts(), path)
            model.load_parts(tree["parts"], optional=() if env is not None else ("obs_stats",))
        model.saved_at = Path(path)
        return model, tree, manifest

    def drop_inert_for_space(self, path: Any) -> None:
        """An earlier version accepted settings that do nothing for these actions: they give way with a line."""
        of_policy, of_learner = inert_for_space(self.policy_config, self.config, self.action_space)
        for found in of_policy:
            self.policy_config = with_value(self.policy_config, found.path.split("."), found.instead)
        for found in of_learner:
            self.config = with_value(self.config, found.path.split("."), found.instead)
        warn_of_inert([*of_policy, *of_learner], path)

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
        chosen = {name: part for name, part in parts.items() if name not in optional}
        refuse_unsound({name: states[name] for name in chosen}, chosen, self.config)
        for name, part in chosen.items():
            part.load_state_dict(states[name])
        self._last_obs, self.live = None, None


class Progress:
    """The counters SB3 keeps on the algorithm."""

    NAMES = ("num_timesteps", "_total_timesteps", "_episode_num", "_n_updates")

    def __init__(self, algorithm: BundledAlgorithm) -> None:
        self.algorithm = algorithm

    def state_dict(self) -> dict[str, Any]:
        counters: dict[str, Any] = {name: int(getattr(self.algorithm, name)) for name in self.NAMES}
        counters["progress_remaining"] = float(self.algorithm._current_progress_remaining)
        counters["n_reserve_all_masked"] = self.algorithm.n_reserve_all_masked
        return counters

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in self.NAMES:
            if int(state[name]) < 0:
                raise StateError(f"{name} is {state[name]}: nothing was ever counted below zero.")
            setattr(self.algorithm, name, int(state[name]))
        self.algorithm._current_progress_remaining = float(state["progress_remaining"])
        self.algorithm.n_reserve_all_masked = int(state["n_reserve_all_masked"])


class EpisodeWindow:
    """Returns, lengths and successes of the last episodes, which SB3 keeps for its logs; not their times of day."""

    def __init__(self, algorithm: BundledAlgorithm) -> None:
        self.algorithm = algorithm

    def state_dict(self) -> dict[str, Any]:
        episodes = list(self.algorithm.ep_info_buffer or ())
        return {
            "returns": [float(episode["r"]) for episode in episodes],
            "lengths": [int(episode["l"]) for episode in episodes],
            "successes": [float(success) for success in self.algorithm.ep_success_buffer or ()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_keys(self, state)
        size = self.algorithm._stats_window_size
        pairs = zip(state["returns"], state["lengths"], strict=True)
        self.algorithm.ep_info_buffer = deque(({"r": float(r), "l": int(n), "t": 0.0} for r, n in pairs), maxlen=size)
        self.algorithm.ep_success_buffer = deque(state["successes"], maxlen=size)


HELD = (
    *("policy_kwargs", "policy_class", "observation_space", "action_space", "n_envs", "seed", "num_timesteps"),
    *("_n_updates", "_total_timesteps", "_episode_num", "_current_progress_remaining"),
    *("ep_info_buffer", "ep_success_buffer", "lr_schedule", "clip_range_vf"),
)
"""SB3's names of what is in a bundle, beside those of parts and settings."""
