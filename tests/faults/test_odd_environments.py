"""Environments that misbehave: an error that names environment, step and checkpoint, and an agent that can go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from tailguard import DistributionalPPO
from tailguard.errors import EnvContractError, EnvStepError, TailguardError
from tests.agents import tiny_agent
from tests.environments import cartpole

OBS = np.zeros(2, np.float32)


class Odd(gym.Env[Any, Any]):
    """Well behaved until one step of its life, when it returns something else or raises."""

    observation_space, action_space = spaces.Box(-1.0, 1.0, (2,), np.float32), spaces.Discrete(2)

    def __init__(
        self, at: int = 0, step: Callable[[], Any] | None = None, reset: Callable[[], Any] | None = None
    ) -> None:
        self.at, self.odd_step, self.odd_reset, self.clock, self.resets = at, step, reset, 0, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.resets += 1
        return self.odd_reset() if self.odd_reset is not None and self.resets > 1 else (OBS, {})

    def step(self, action: Any) -> Any:
        self.clock += 1
        if self.odd_step is not None and self.clock == self.at:
            return self.odd_step()
        return OBS, 0.5, self.clock % 20 == 0, False, {}


def raises() -> Any:
    raise ZeroDivisionError("the market is closed")


def with_(**odd: Any) -> Callable[[], Any]:
    step = {"obs": OBS, "reward": 0.5, "terminated": False, "truncated": False, "info": {}, **odd}
    return lambda: tuple(step.values())


STEPS: list[tuple[Callable[[], Any], str]] = [
    (
        with_(obs=np.zeros(3, np.float32)),
        r"step returned an observation of shape \(3,\) and type float32; expected .*\(2,\)",
    ),
    (with_(obs=np.float32(0.5)), r"an observation of shape \(\)"),
    (with_(obs=np.array(["a", "b"])), "an observation of shape .* and type <U1"),
    (with_(obs=np.zeros(2, np.complex64)), "type complex64"),
    (with_(obs=None), r"the observation None \(NoneType\)"),
    (with_(obs="nothing"), r"the observation 'nothing' \(str\)"),
    (with_(obs={"a": 1}), r"the observation \{'a': 1\} \(dict\)"),
    (with_(obs=np.array([np.nan, 0.0], np.float32)), "observation is nan at step 4 of the rollout in environment 1"),
    (with_(reward=None), r"the reward is None \(NoneType\); expected one number"),
    (with_(reward="1.5"), r"the reward is '1.5' \(str\)"),
    (with_(reward=1j), r"the reward is 1j \(complex\)"),
    (with_(reward=np.zeros(2)), "the reward is array"),
    (with_(reward=[1.0, 2.0]), r"the reward is \[1.0, 2.0\]"),
    (with_(terminated=None), "terminated is None"),
    (with_(truncated="no"), "truncated is 'no'"),
    (with_(info=None), "info is None"),
    (with_(info=[1]), r"info is \[1\] \(list\)"),
    (lambda: (OBS, 0.5, False, {}), "step returned a tuple of 4; expected a tuple of observation, reward, terminated"),
    (lambda: None, "step returned a NoneType"),
    (raises, "step raised ZeroDivisionError: the market is closed"),
]
RESETS: list[tuple[Callable[[], Any], str]] = [
    (lambda: OBS, "reset returned array"),
    (lambda: None, "reset returned None"),
    (lambda: (np.zeros(5), {}), r"reset returned an observation of shape \(5,\)"),
    (lambda: (OBS, None), "expected a tuple of observation and info, a dict"),
    (raises, "reset raised ZeroDivisionError"),
]


def agent_in(odd: Callable[[], gym.Env[Any, Any]], normalized: bool = False) -> DistributionalPPO:
    env: Any = DummyVecEnv([Odd, odd, Odd, Odd])
    return tiny_agent(VecNormalize(env, norm_reward=False) if normalized else env)


@pytest.mark.parametrize(("step", "message"), STEPS, ids=[message for _, message in STEPS])
@pytest.mark.parametrize("normalized", [False, True], ids=["plain", "normalized"])
def test_an_odd_step_is_named_and_the_agent_goes_on(
    tmp_path: Path, step: Callable[[], Any], message: str, normalized: bool
) -> None:
    agent = agent_in(lambda: Odd(32 + 5, step), normalized)
    agent.learn(128)
    agent.checkpoint(tmp_path / "saved")
    with pytest.raises(TailguardError, match=message) as stop:
        agent.learn(128, reset_num_timesteps=False)
    said = str(stop.value)
    assert "nvironment 1" in said
    assert "step 4 of the rollout" in said
    assert f"Training stopped at step 144; the last checkpoint is {tmp_path / 'saved'}" in said
    assert agent.learn(128, reset_num_timesteps=False).num_timesteps == 144 + 128  # the oddity is over
    assert all(parameter.isfinite().all() for parameter in agent.policy.parameters())


@pytest.mark.parametrize(("reset", "message"), RESETS, ids=[message for _, message in RESETS])
def test_an_odd_reset_is_named_when_learning_begins_and_in_the_middle(reset: Callable[[], Any], message: str) -> None:
    with pytest.raises(TailguardError, match=message) as stop:
        agent_in(lambda: Odd(reset=reset)).learn(128)
    assert "Environment 1 (Odd), at step 20 of the rollout" in str(stop.value)
    assert "nothing has been saved yet" in str(stop.value)
    first = Odd(reset=reset)
    first.resets = 1
    with pytest.raises(TailguardError, match=message):
        agent_in(lambda: first).learn(128)


def test_the_error_of_an_environment_is_kept_as_the_cause() -> None:
    with pytest.raises(EnvStepError) as stop:
        agent_in(lambda: Monitor(Odd(3, raises))).learn(128)
    cause = stop.value.__cause__
    while cause is not None and not isinstance(cause, ZeroDivisionError):
        cause = cause.__cause__
    assert isinstance(cause, ZeroDivisionError)


class OddVecEnv(DummyVecEnv):
    """A VecEnv of somebody else."""

    def __init__(self, what: Any) -> None:
        super().__init__([Odd, Odd])
        self.what = what

    def step_wait(self) -> Any:
        result = super().step_wait()
        return self.what(result)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (lambda r: (r[0][:1], *r[1:]), r"observations have shape \(1, 2\)"),
        (lambda r: (r[0], r[1].astype(str), *r[2:]), "rewards have type <U"),
        (lambda r: (*r[:3], [None, None]), r"infos are \[None, None\]"),
        (lambda r: r[:3], "step returned"),
        (lambda r: 1 / 0, r"The environments \(OddVecEnv\) raised ZeroDivisionError"),
    ],
)
def test_an_odd_vec_env_is_named(what: Any, message: str) -> None:
    with pytest.raises((EnvContractError, EnvStepError), match=message):
        tiny_agent(OddVecEnv(what)).learn(128)


def test_between_two_steps_environments_are_as_they_were() -> None:
    from stable_baselines3.common.callbacks import BaseCallback

    env = cartpole(2, 0)
    assert isinstance(env, DummyVecEnv)
    before, seen = list(env.envs), []

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            seen.append(all(a is b for a, b in zip(env.envs, before, strict=True)))
            return True

    tiny_agent(env, batch_size=16).learn(64, Look())
    assert seen
    assert all(seen)
    assert all(a is b for a, b in zip(env.envs, before, strict=True))
