"""An experiment: where an agent trains, with which settings, for how long, from which seed.

`ExperimentConfig` is what a YAML file or the command line says, complete and checked; `Experiment` builds from it the
environment and the agent. Where the environment comes from is a `Task` (a preset, a Gymnasium id, a user's own bars): a
task brings its own defaults, and everything the user says goes on top of them.

    config = experiment_config({"preset": "regime", "steps": 100_000}, overrides=["ppo.gamma=0.95"])
    agent = Experiment(config).agent()
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import gymnasium as gym
from pydantic import Field
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv

from tailguard.configuration import Config, Environments, PositiveInt, Seed, saved_config
from tailguard.env import Costs, TradingVecEnv, oracle_env
from tailguard.env.dataset import DataConfig, Dataset, Default, data_defaults, nested_defaults, read_bars, split_of
from tailguard.errors import ConfigError, InertSetting, did_you_mean
from tailguard.market import Bars
from tailguard.policy import PolicyConfig
from tailguard.policy.config import OF_MEMORY
from tailguard.ppo import DistributionalPPO, PPOConfig
from tailguard.ppo.fingerprint import fingerprint
from tailguard.presets import Preset, preset, trading_config
from tailguard.run import CheckpointConfig
from tailguard.yaml_files import parse_yaml, read_yaml, write_yaml

VALIDATION_SEED = 500_000_000
"""Far from every training seed: another draw of an embedded market, other episodes of a Gymnasium environment."""
PASSES, LEAST_STEPS, MOST_STEPS = 25, 200_000, 1_000_000
"""Own bars: how often training passes over each bar, within these bounds of environment steps."""


class ExperimentConfig(Config):
    """Everything about a training run. Exactly one of the sources (`preset`, `gym_env`, `data`) is given."""

    preset: str | None = None
    """An embedded market and its settings (`tailguard.presets`)."""
    gym_env: str | None = None
    """A registered Gymnasium environment, such as CartPole-v1."""
    data: DataConfig | None = None
    """A user's own bars (`tailguard.env.dataset`)."""
    policy: str = "MlpLstmPolicy"
    """MlpLstmPolicy, or MlpPolicy without memory."""
    policy_kwargs: PolicyConfig = PolicyConfig()
    """Sizes and kinds of the networks."""
    n_envs: Environments = 16
    """Environments stepped together."""
    steps: PositiveInt = 1_000_000
    """Environment steps of the whole training."""
    seed: Seed = 0
    """Root of every random stream."""
    ppo: PPOConfig = PPOConfig()
    """The learner."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """When bundles are written and which are kept."""

    def inert(self) -> Iterable[InertSetting]:
        if self.policy == "MlpPolicy":
            kwargs, why = self.policy_kwargs, "MlpPolicy has no memory; use policy=MlpLstmPolicy"
            of_memory = ("memory", *OF_MEMORY) if kwargs.memory == "gru" else OF_MEMORY
            yield from (found.below("policy_kwargs") for found in kwargs.unread(of_memory, why))

    def to_yaml(self) -> str:
        """The whole configuration as YAML that `load_experiment` reads back unchanged."""
        return write_yaml(self.model_dump(mode="json"))


class Task(Protocol):
    """Where an agent trains: a name, the settings it brings, and its environment."""

    @property
    def name(self) -> str: ...

    def defaults(self) -> dict[str, Any]:
        """Fields of `ExperimentConfig` that this task sets when the user does not."""
        ...

    def env(self, n_envs: int, seed: int) -> VecEnv:
        """A fresh training environment."""
        ...

    def validation_env(self, n_envs: int, seed: int) -> VecEnv:
        """An environment where nobody trains, to choose among agents without a look at test."""
        ...


@dataclass(frozen=True)
class PresetTask:
    """An embedded market whose optimum is known."""

    preset: Preset

    @property
    def name(self) -> str:
        return self.preset.name

    def defaults(self) -> dict[str, Any]:
        return {
            "n_envs": self.preset.n_envs,
            "steps": self.preset.total_timesteps,
            "ppo": self.preset.config.model_dump(mode="json"),
            "policy_kwargs": self.preset.policy_kwargs,
        }

    def env(self, n_envs: int, seed: int) -> VecEnv:
        return oracle_env(self.preset.market, n_envs, seed, config=self.preset.env_config)

    def validation_env(self, n_envs: int, seed: int) -> VecEnv:
        return self.env(n_envs, seed + VALIDATION_SEED)


@dataclass(frozen=True)
class GymTask:
    """A registered Gymnasium environment."""

    name: str

    def defaults(self) -> dict[str, Any]:
        return {}

    def env(self, n_envs: int, seed: int) -> VecEnv:
        return make_vec_env(self.name, n_envs, seed=seed)

    def validation_env(self, n_envs: int, seed: int) -> VecEnv:
        return self.env(n_envs, seed + VALIDATION_SEED)


@dataclass(frozen=True)
class DataTask:
    """A user's own bars: what is not said is chosen from them, and `choices` says why."""

    given: Mapping[str, Any]

    @property
    def config(self) -> DataConfig:
        return DataConfig(**merged(nested_defaults(self.choices), self.given))

    @property
    def name(self) -> str:
        return Path(self.config.files[0]).stem

    @cached_property
    def bars(self) -> Bars:
        return read_bars(DataConfig(**{**self.given, "costs": Costs()}))

    @cached_property
    def choices(self) -> tuple[Default, ...]:
        """Settings that these bars ask for, unless the user sets them."""
        return data_defaults(self.bars, {name: value for name, value in self.given.items() if name != "costs"})

    @cached_property
    def dataset(self) -> Dataset:
        return Dataset.of(self.config, self.bars)

    def defaults(self) -> dict[str, Any]:
        n_train = len(split_of(self.config, len(self.bars)).train)
        return {
            "data": nested_defaults(self.choices),
            "n_envs": 64,
            "steps": min(max(PASSES * n_train, LEAST_STEPS), MOST_STEPS),
            "ppo": trading_config().model_dump(mode="json"),
        }

    def env(self, n_envs: int, seed: int) -> VecEnv:
        return self.dataset.training_env(n_envs, seed)

    def validation_env(self, n_envs: int, seed: int) -> VecEnv:
        return self.dataset.validation_env(n_envs, seed)


def task_of(settings: Mapping[str, Any]) -> Task:
    """The task that (possibly unchecked) settings name."""
    sources = {name: settings.get(name) for name in ("preset", "gym_env", "data")}
    given = {name: value for name, value in sources.items() if value is not None}
    if len(given) != 1:
        found = f"{' and '.join(given)} are both given" if given else "nothing says where to train"
        raise ConfigError(
            f"{found.capitalize()}: give exactly one of {', '.join(sources)}, for example --preset regime."
        )
    ((source, name),) = given.items()
    if source == "data":
        if isinstance(name, DataConfig):
            name = name.model_dump(mode="json")
        if not isinstance(name, Mapping):
            raise ConfigError(f"data={name!r}: expected settings, such as {{files: [bars.csv], tz: UTC}}.")
        return DataTask(name)
    if not isinstance(name, str):
        raise ConfigError(f"{source}={name!r}: expected a name.")
    return PresetTask(preset(name)) if source == "preset" else GymTask(registered(name))


def registered(name: str) -> str:
    """A Gymnasium id that is known without importing anything: a configuration does not run code."""
    if name not in gym.registry:
        raise ConfigError(
            f"There is no registered Gymnasium environment {name!r}.{did_you_mean(name, gym.registry)} "
            "For your own, use DistributionalPPO with it in Python (docs/resume.md)."
        )
    return name


def experiment_config(given: Mapping[str, Any], overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Checked settings: the task's defaults, what is given on top, and `key.path=value` overrides last."""
    wanted = dict(given)
    for override in overrides:
        wanted = merged(wanted, parsed_override(override))
    return ExperimentConfig(**merged(task_of(wanted).defaults(), wanted))


def load_experiment(
    path: str | Path | None, given: Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> ExperimentConfig:
    """Settings from a YAML file (or none), with named ones and `key.path=value` overrides on top."""
    from_file = read_yaml(path) if path is not None else {}
    return experiment_config(merged(from_file, given or {}), overrides)


def saved_experiment(path: str | Path) -> ExperimentConfig:
    """What a run wrote down: an earlier version may have accepted settings that do nothing, which give way."""
    given = read_yaml(path)
    return saved_config(ExperimentConfig, merged(task_of(given).defaults(), given), path)


def on_shared_paths(config: ExperimentConfig) -> ExperimentConfig:
    """With absolute files: workers may run in another directory, or on another machine that shares the path."""
    if config.data is None:
        return config
    files = tuple(str(Path(file).resolve()) for file in config.data.files)
    return config.replace(data=config.data.replace(files=files))


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`, mapping by mapping; anything else replaces."""
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def parsed_override(text: str) -> dict[str, Any]:
    """'ppo.gamma=0.9' as {"ppo": {"gamma": 0.9}}; the value is read as YAML."""
    path, equals, value = text.partition("=")
    names = path.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set {text!r} is not of the form key.path=value, such as ppo.gamma=0.9.")
    nested: Any = parse_yaml(value, f"--set {text}")
    for name in reversed(names):
        nested = {name: nested}
    return dict(nested)


@dataclass(frozen=True)
class Experiment:
    """Builds what a configuration describes; the same configuration always builds the same."""

    config: ExperimentConfig

    @cached_property
    def task(self) -> Task:
        return task_of({name: getattr(self.config, name) for name in ("preset", "gym_env", "data")})

    def training_env(self) -> VecEnv:
        """A fresh environment, at the start of its first episodes."""
        return self.task.env(self.config.n_envs, self.config.seed)

    def agent(self, env: VecEnv | None = None) -> DistributionalPPO:
        """A fresh agent in `env`, or in a fresh environment."""
        return DistributionalPPO(
            self.config.policy,
            env if env is not None else self.training_env(),
            config=self.config.ppo,
            policy_kwargs=self.config.policy_kwargs.model_dump(),
            seed=self.config.seed,
        )

    def manifest(self, env: VecEnv, command: Sequence[str]) -> dict[str, Any]:
        """What a run's manifest.json says: where the numbers come from."""
        data = {"bars": env.bars.digest()} if isinstance(env, TradingVecEnv) else {}
        return {
            "task": self.task.name,
            "config": self.config.model_dump(mode="json"),
            "seed": self.config.seed,
            "command": list(command),
            "data": data,
            "versions": fingerprint(),
        }
