"""Who is examined: a way to make environments, a way to make agents in them, and a market if there is one."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv

from tailguard.env import TradingVecEnv
from tailguard.env.dataset import DataConfig, Dataset
from tailguard.env.oracle import env_of
from tailguard.errors import ConfigError
from tailguard.experiment import DataTask, Experiment, ExperimentConfig, PresetTask, experiment_config
from tailguard.market import Bars
from tailguard.ppo import DistributionalPPO, PPOConfig

Prices = Mapping[str, NDArray[np.float64]]
"""Bars: open, high, low, close and volume, each (T,); `pandas.DataFrame(prices)` is a frame of them."""

N_ENVS, N_STEPS, SEQUENCE_LENGTH = 4, 64, 16


@dataclass(frozen=True)
class Market:
    """A market behind the environment: its bars, and the environment made anew from other bars of the same shape."""

    bars: Bars
    env: Callable[[Bars, int, int], TradingVecEnv]
    """(bars, n_envs, seed): features are computed from the bars given, with everything fitted as it was."""
    data: DataConfig | None = None
    """How the bars were read from files, if they were."""


@dataclass(frozen=True)
class Patient:
    """What the checks examine. Rollouts are short and networks are the patient's own."""

    name: str
    make_env: Callable[[int, int], VecEnv]
    """(n_envs, seed)"""
    config: PPOConfig
    policy: str = "MlpLstmPolicy"
    policy_kwargs: dict[str, Any] | None = None
    market: Market | None = None
    on_prices: Callable[[Prices], gym.Env[Any, Any]] | None = None
    """The environment built on given prices, where its maker can do that."""
    n_envs: int = N_ENVS
    """Environments stepped together in training; most checks take fewer."""

    def env(self, n_envs: int = N_ENVS, seed: int = 0) -> VecEnv:
        return self.make_env(n_envs, seed)

    def agent(self, env: VecEnv | None = None, seed: int = 0, **settings: Any) -> DistributionalPPO:
        """A fresh agent with the patient's settings in a short rollout."""
        short = {"n_steps": min(self.config.n_steps, N_STEPS), "batch_size": None, "microbatch_size": None}
        short["sequence_length"] = min(self.config.sequence_length, SEQUENCE_LENGTH)
        agent = DistributionalPPO(
            self.policy,
            env if env is not None else self.env(),
            config=self.config.replace(**{**short, **settings}),
            policy_kwargs=self.policy_kwargs,
            seed=seed,
        )
        agent.set_logger(Logger(None, []))
        return agent

    def collected(
        self, prepare: Callable[[DistributionalPPO], None] = lambda agent: None, **settings: Any
    ) -> DistributionalPPO:
        """An agent after one rollout, before any update; `prepare` sees it before the rollout."""
        agent = self.agent(**settings)
        prepare(agent)
        _, callback = agent._setup_learn(10**9, reset_num_timesteps=True)
        callback.on_training_start({}, {})
        assert agent.env is not None  # noqa: S101 (built with one)
        agent.collect_rollouts(agent.env, callback, agent.rollout_buffer, agent.config.n_steps)
        return agent

    @cached_property
    def action_space(self) -> gym.Space[Any]:
        env = self.env(1)
        try:
            return env.action_space
        finally:
            env.close()

    def actions(self, n_envs: int, n_steps: int, seed: int) -> list[np.ndarray[Any, Any]]:
        """Random actions, the same for the same seed."""
        space = self.action_space
        space.seed(seed)
        return [np.stack([np.asarray(space.sample()) for _ in range(n_envs)]) for _ in range(n_steps)]


def patient_of(config: ExperimentConfig) -> Patient:
    """The patient that a configuration describes."""
    experiment = Experiment(config)
    return Patient(
        name=experiment.task.name,
        make_env=experiment.task.env,
        config=config.ppo,
        policy=config.policy,
        policy_kwargs=config.policy_kwargs.model_dump(),
        market=market_of(experiment),
        n_envs=config.n_envs,
    )


def market_of(experiment: Experiment) -> Market | None:
    """The market of a preset or of a user's own bars; other environments have none that we could look into."""
    task = experiment.task
    if isinstance(task, PresetTask):
        market, rules = task.preset.market, task.preset.env_config

        def oracle(bars: Bars, n_envs: int, seed: int) -> TradingVecEnv:
            return env_of(market, bars, rules, n_envs, seed=seed)

        return Market(market.bars(4_000, 0), oracle)
    if isinstance(task, DataTask):
        data = task.dataset

        def own(bars: Bars, n_envs: int, seed: int) -> TradingVecEnv:
            return Dataset.of(data.config, bars, data.scaler, data.split).training_env(n_envs, seed)

        return Market(data.bars, own, data.config)
    return None


def preset_patient(name: str) -> Patient:
    return patient_of(experiment_config({"preset": name}))


def env_patient(path: str) -> Patient:
    """Any Gymnasium environment by the function that makes it, `module:function`; running it is the user's wish."""
    module_name, colon, name = path.partition(":")
    if not colon:
        raise ConfigError(f"--env {path!r} is not of the form module:function, such as mypackage.envs:make_env.")
    try:
        make = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--env {path}: {error}. The module must be importable from here.") from None
    refuse_other_things(path, make)
    return gym_patient(path, make)


def refuse_other_things(path: str, make: Any) -> None:
    """The function must make a Gymnasium environment when called without arguments."""
    try:
        env = make()
    except Exception as error:
        raise ConfigError(
            f"--env {path}: calling it without arguments failed with {type(error).__name__}: {error}. "
            "Name a function that makes one Gymnasium environment."
        ) from error
    if not isinstance(env, gym.Env):
        raise ConfigError(f"--env {path} made a {type(env).__name__}, not a gymnasium.Env.")
    env.close()


def gym_patient(name: str, make: Callable[..., gym.Env[Any, Any]]) -> Patient:
    """A function that makes one Gymnasium environment, and makes it of given prices if it has an argument `prices`."""

    def vectorized(n_envs: int, seed: int) -> VecEnv:
        env = DummyVecEnv([lambda: Monitor(make()) for _ in range(n_envs)])
        env.seed(seed)
        return env

    takes_prices = "prices" in inspect.signature(make).parameters
    return Patient(name, vectorized, PPOConfig(), on_prices=partial(on_given, make) if takes_prices else None)


def on_given(make: Callable[..., gym.Env[Any, Any]], prices: Prices) -> gym.Env[Any, Any]:
    return make(prices=prices)
