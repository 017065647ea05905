"""E4: environments that fail in the middle of a run are named, and the run goes on from its checkpoint."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import SubprocVecEnv, VecEnv, VecNormalize

from tailguard import DistributionalPPO
from tailguard.errors import EnvContractError, EnvWorkerError, NonFiniteError, TailguardError, TrainingDivergedError
from tailguard.run import CheckpointConfig, Listener, Outcome, RunFolder, Update, resumed, train
from tests.agents import tiny_agent
from tests.environments import HideVelocities, cartpole
from tests.runs import STEPS_PER_UPDATE, whole_state

EVERY = CheckpointConfig(every_updates=1)


def one_cartpole() -> gym.Env[Any, Any]:
    return Monitor(HideVelocities(gym.make("CartPole-v1"), keep=(0, 2)))


def workers() -> VecEnv:
    return SubprocVecEnv([one_cartpole for _ in range(4)], start_method="fork")


def trained(folder: RunFolder, make_env: Any, listener: Listener | None = None, **settings: Any) -> Outcome:
    env = make_env()
    try:
        with folder.lock():
            agent = resumed(folder, lambda: env, partial(tiny_agent, **settings), EVERY)
            return train(agent, folder, 5 * STEPS_PER_UPDATE, EVERY, listener)
    finally:
        env.close()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_whose_worker_dies_or_freezes_is_resumed_to_the_same_bits(tmp_path: Path, number: signal.Signals) -> None:
    whole, folder = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "run")
    trained(whole, workers, env_timeout=2.0)
    env = workers()

    def strike(update: Update) -> None:
        if update.step == 3 * STEPS_PER_UPDATE:
            assert isinstance(env, SubprocVecEnv)
            os.kill(env.processes[2].pid, number)

    with pytest.raises(EnvWorkerError, match="worker of environment 2"):
        trained(folder, lambda: env, Listener(update=strike), env_timeout=2.0)
    assert folder.steps()[-1] == 3 * STEPS_PER_UPDATE
    assert trained(folder, workers, env_timeout=2.0).finished
    assert whole_state(folder.last_checkpoint()) == whole_state(whole.last_checkpoint())


class Poisoned(gym.Wrapper[Any, Any, Any, Any]):
    """Gives something that is not finite at one step of its life."""

    def __init__(self, env: gym.Env[Any, Any], what: str, at: int) -> None:
        super().__init__(env)
        self.what, self.at, self.clock = what, at, 0

    def poison(self, name: str, value: Any) -> Any:
        return np.full_like(value, np.nan) if self.what == name and self.clock == self.at else value

    def reset(self, **options: Any) -> Any:
        observation, info = self.env.reset(**options)
        return self.poison("reset", observation), info

    def step(self, action: Any) -> Any:
        self.clock += 1
        observation, reward, terminated, truncated, info = self.env.step(action)
        reward = float("inf") if self.what == "reward" and self.clock == self.at else reward
        return self.poison("observation", observation), reward, terminated, truncated, info


def poisoned(what: str, at: int) -> VecEnv:
    from stable_baselines3.common.vec_env import DummyVecEnv

    makers = [one_cartpole, one_cartpole, lambda: Poisoned(one_cartpole(), what, at), one_cartpole]
    return VecNormalize(DummyVecEnv(makers), norm_reward=False)


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("observation", EnvContractError, "observation is nan at step 15 of the rollout in environment 2, feature 0"),
        ("reward", NonFiniteError, "reward is inf at step 15 of the rollout in environment 2"),
    ],
)
def test_a_number_that_is_not_finite_stops_the_run_and_poisons_nothing(
    tmp_path: Path, what: str, error: type[TailguardError], message: str
) -> None:
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(error, match=message):
        trained(folder, lambda: poisoned(what, 2 * 32 + 16))
    assert folder.steps()[-1] == 2 * STEPS_PER_UPDATE
    agent = DistributionalPPO.load(folder.last_checkpoint(), env=cartpole(4, 0))
    assert np.isfinite(agent.obs_stats.state_dict()["mean"]).all()
    assert trained(folder, lambda: VecNormalize(cartpole(4, 0), norm_reward=False)).finished


def test_a_first_observation_that_is_not_finite_is_refused_before_the_normalizer_sees_it() -> None:
    env = poisoned("reset", 0)
    with pytest.raises(EnvContractError, match="observation is nan after reset in environment 2, feature 0"):
        tiny_agent(env).learn(128)
    assert isinstance(env, VecNormalize)
    assert np.isfinite(env.obs_rms.mean).all()


def test_training_that_diverges_stops_with_the_last_good_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    agents: list[DistributionalPPO] = []

    def make_agent(env: VecEnv) -> DistributionalPPO:
        agents.append(tiny_agent(env, max_skipped_steps=2))
        return agents[-1]

    def spoil(update: Update) -> None:
        if update.step == 2 * STEPS_PER_UPDATE:
            for parameter in agents[0].policy.parameters():
                parameter.register_hook(lambda gradient: gradient * float("nan"))

    agent = resumed(folder, lambda: cartpole(4, 0), make_agent, EVERY)
    with folder.lock(), pytest.raises(TrainingDivergedError, match="2 optimizer steps in a row"):
        train(agent, folder, 5 * STEPS_PER_UPDATE, EVERY, Listener(update=spoil))
    good = DistributionalPPO.load(folder.last_checkpoint())
    assert good.num_timesteps == 2 * STEPS_PER_UPDATE
    assert all(parameter.isfinite().all() for parameter in good.policy.parameters())
