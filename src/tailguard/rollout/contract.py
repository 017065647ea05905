"""Environments in this process, watched: what they return is looked at before anything is made of it.

SB3's DummyVecEnv writes what an environment returns into arrays of its own, and so a reward of "1.5", an observation of
the wrong size or an imaginary part would silently become something else, or an error of numpy that names nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvWrapper

from tailguard.errors import EnvContractError, EnvStepError, TailguardError

NUMBERS = "iufb"  # kinds of numpy that are numbers


class Watched:
    """One environment; everything but `step` and `reset` is its own."""

    def __init__(self, env: Any, number: int, space: spaces.Space[Any]) -> None:
        self.env, self.number, self.space = env, number, space
        self.shape, self.steps = space.shape, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def step(self, action: Any) -> Any:
        try:
            result = self.env.step(action)
        except TailguardError:
            raise
        except Exception as error:
            raise self.failed("step", error) from error
        if not isinstance(result, tuple) or len(result) != 5:
            size = f" of {len(result)}" if isinstance(result, tuple) else ""
            raise self.wrong(
                f"step returned a {type(result).__name__}{size}",
                "a tuple of observation, reward, terminated, truncated and info",
            )
        observation, reward, terminated, truncated, info = result
        self.check_observation(observation, "step")
        if type(reward) is not float:
            self.check_reward(reward)
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_ | int):
                raise self.wrong(f"{name} is {told(flag)}", "True or False")
        if not isinstance(info, dict):
            raise self.wrong(f"info is {told(info)}", "a dict, which may be empty")
        self.steps += 1
        return result

    def reset(self, **options: Any) -> Any:
        try:
            result = self.env.reset(**options)
        except TailguardError:
            raise
        except Exception as error:
            raise self.failed("reset", error) from error
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            raise self.wrong(f"reset returned {told(result)}", "a tuple of observation and info, a dict")
        self.check_observation(result[0], "reset")
        return result

    def check_observation(self, observation: Any, where: str) -> None:
        array = observation if type(observation) is np.ndarray else np.asarray(observation, object)
        if array.dtype.kind == "O":
            try:
                if observation is None:  # numpy would make NaN of it
                    raise TypeError
                array = np.asarray(observation, np.float64)
            except (TypeError, ValueError):
                raise self.wrong(f"{where} returned the observation {told(observation)}", self.expected) from None
        if array.shape != self.shape or array.dtype.kind not in NUMBERS:
            found = f"an observation of shape {array.shape} and type {array.dtype}"
            raise self.wrong(f"{where} returned {found}", self.expected)

    @property
    def expected(self) -> str:
        return f"numbers of shape {self.shape}, as its observation_space says"

    def check_reward(self, reward: Any) -> None:
        array = np.asarray(reward) if not isinstance(reward, str | bytes) and reward is not None else None
        if array is None or array.dtype.kind not in NUMBERS or array.size != 1 or array.ndim > 1:
            raise self.wrong(f"the reward is {told(reward)}", "one number")

    def wrong(self, what: str, expected: str) -> EnvContractError:
        return EnvContractError(f"{self.name}: {what}; expected {expected}. Mend it in {type(self.inner).__name__}.")

    def failed(self, where: str, error: Exception) -> EnvStepError:
        return EnvStepError(f"{self.name}: {where} raised {type(error).__name__}: {error}. Its traceback is the cause.")

    @property
    def name(self) -> str:
        return f"Environment {self.number} ({type(self.inner).__name__}), at step {self.steps} of the rollout"

    @property
    def inner(self) -> Any:
        """The environment below its wrappers."""
        return getattr(self.env, "unwrapped", self.env)


def told(value: Any) -> str:
    """A value in a message: short, with its type."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def below_wrappers(env: VecEnv | None) -> VecEnv | None:
    while isinstance(env, VecEnvWrapper):
        env = env.venv
    return env


@contextmanager
def watched_environments(env: VecEnv | None) -> Iterator[None]:
    """Inside, environments of a DummyVecEnv below any wrappers are watched; what others raise is named as theirs."""
    inner = below_wrappers(env)
    before: Any = inner.envs if isinstance(inner, DummyVecEnv) else []
    if isinstance(inner, DummyVecEnv):
        watched: list[Any] = [Watched(one, number, inner.observation_space) for number, one in enumerate(before)]
        inner.envs = watched
    try:
        yield
    except TailguardError:
        raise
    except Exception as error:
        raise named_failure_of(inner, error) from error
    finally:
        if isinstance(inner, DummyVecEnv):
            inner.envs = before


def named_failure_of(env: VecEnv | None, error: Exception) -> EnvStepError:
    return EnvStepError(f"The environments ({type(env).__name__}) raised {type(error).__name__}: {error}.")


def watched_step(env: VecEnv) -> Callable[[Any], tuple[Any, Any, Any, Any]]:
    """A function that steps the environments and looks at what they return: for one rollout. Between two steps, when
    callbacks may look at them, they are as they were."""
    inner, n, shape = below_wrappers(env), env.num_envs, env.observation_space.shape
    watched = None
    if isinstance(inner, DummyVecEnv):
        watched = [Watched(one, number, inner.observation_space) for number, one in enumerate(inner.envs)]

    def step(actions: Any) -> tuple[Any, Any, Any, Any]:
        before = inner.envs if watched is not None else None  # type: ignore[union-attr]
        if watched is not None:
            inner.envs = watched  # type: ignore[union-attr]
        try:
            result = env.step(actions)
        except TailguardError:
            raise
        except Exception as error:
            raise named_failure_of(inner, error) from error
        finally:
            if watched is not None:
                inner.envs = before  # type: ignore[union-attr]
        refuse_odd_step(result, n, shape, type(inner).__name__)
        return result

    return step


def refuse_odd_step(result: Any, n: int, shape: tuple[int, ...] | None, kind: str) -> None:
    """What a VecEnv's step returned, as a whole; numbers are looked at by `check_step`."""
    if not isinstance(result, tuple) or len(result) != 4:
        raise EnvContractError(
            f"{kind}: step returned {told(result)}; expected observations, rewards, dones and infos."
        )
    observations, rewards, _, infos = result
    seen, paid = np.asarray(observations), np.asarray(rewards)
    if seen.shape != (n, *(shape or ())) or seen.dtype.kind not in NUMBERS:
        raise EnvContractError(
            f"{kind}: observations have shape {seen.shape} and type {seen.dtype}; expected numbers of shape "
            f"{(n, *(shape or ()))}, one row per environment."
        )
    if paid.dtype.kind not in NUMBERS:
        raise EnvContractError(f"{kind}: rewards have type {paid.dtype}; expected numbers.")
    if len(infos) != n or not all(isinstance(info, dict) for info in infos):
        raise EnvContractError(f"{kind}: infos are {told(infos)}; expected {n} dicts, one per environment.")
