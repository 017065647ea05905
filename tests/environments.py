"""Tiny environments with known answers, for tests and benchmarks."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv


class HideVelocities(gym.ObservationWrapper[Any, Any, Any]):
    """Keep only some features of the observation: positions without velocities need memory."""

    def __init__(self, env: gym.Env[Any, Any], keep: tuple[int, ...]) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, spaces.Box)
        self.keep = list(keep)
        self.observation_space = spaces.Box(space.low[self.keep], space.high[self.keep], dtype=np.float32)

    def observation(self, observation: NDArray[Any]) -> NDArray[Any]:
        return observation[self.keep]


def cartpole(n_envs: int, seed: int) -> VecEnv:
    """CartPole without velocities."""
    return make_vec_env("CartPole-v1", n_envs, seed=seed, wrapper_class=HideVelocities, wrapper_kwargs={"keep": (0, 2)})


def pendulum(n_envs: int, seed: int) -> VecEnv:
    """Pendulum without its angular velocity."""
    return make_vec_env("Pendulum-v1", n_envs, seed=seed, wrapper_class=HideVelocities, wrapper_kwargs={"keep": (0, 1)})


class NoiseChain(gym.Env[Any, Any]):
    """Endless: reward mean + N(0, 1) whatever is done. The return's law is known: std 1 / sqrt(1 - gamma^2)."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, mean: float = 0.0) -> None:
        self.mean = mean

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[Any], dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), float(self.mean + self.np_random.normal()), False, False, {}


class ConstantReward(gym.Env[Any, Any]):
    """Reward 1 per step, cut after `limit` steps; the observation knows no clock."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, limit: int = 100, truncates: bool = True, reward: float = 1.0) -> None:
        self.limit, self.truncates, self.reward = limit, truncates, reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.clock = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        self.clock += 1
        over = self.clock >= self.limit
        return np.zeros(1, np.float32), self.reward, over and not self.truncates, over and self.truncates, {}


class Countdown(gym.Env[Any, Any]):
    """Reward 1 for twenty steps, and the clock is in sight: the return can be known exactly."""

    observation_space = spaces.Box(0.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(10, 21))
        return np.array([self.left / 20.0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return np.array([self.left / 20.0], np.float32), 1.0, self.left == 0, False, {}


class Recall(gym.Env[Any, Any]):
    """A cue of +1 or -1 is shown once; `delay` steps later the agent must name it. Chance earns 0.5."""

    observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, delay: int = 8) -> None:
        self.delay = delay

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.cue, self.clock = int(self.np_random.integers(2)), 0
        return np.array([2.0 * self.cue - 1.0, 0.0], np.float32), {}

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        self.clock += 1
        asked = self.clock > self.delay
        observation = np.array([0.0, float(self.clock == self.delay)], np.float32)
        return observation, float(asked and int(action) == self.cue), asked, False, {}


class Identity(gym.Env[Any, Any]):
    """The right action is the observation itself; works for every action space. Reward 1 when right, or -distance."""

    def __init__(self, action_space: spaces.Space[Any], length: int = 20) -> None:
        self.action_space, self.length = action_space, length
        self.size = len(np.atleast_1d(self.flat(action_space.sample())))
        self.observation_space = spaces.Box(-8.0, 8.0, (self.size,), np.float32)

    @staticmethod
    def flat(action: Any) -> NDArray[Any]:
        return np.atleast_1d(np.asarray(action, np.float32)).reshape(-1)

    def show(self) -> NDArray[Any]:
        self.wanted = self.flat(self.action_space.sample())
        return self.wanted

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[Any], dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.action_space.seed(seed)
        self.clock = 0
        return self.show(), {}

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        self.clock += 1
        gap = np.abs(self.flat(action) - self.wanted)
        reward = -float(gap.mean()) if isinstance(self.action_space, spaces.Box) else float((gap == 0).mean())
        return self.show(), reward, False, self.clock >= self.length, {}


class OneShot(VecEnv):
    """The part of SB3's interface that environments of one object share."""

    def close(self) -> None:
        pass

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name, None)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        return [getattr(self, method_name)(*args, **kwargs)] * self.num_envs

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs


class Cliff(OneShot):
    """A bandit: s ~ U(-1, 1), reward -(a - tanh(25 s))^2. Who may be lied to by 0.2 must not be steep at zero."""

    def __init__(self, n_envs: int, seed: int) -> None:
        super().__init__(n_envs, spaces.Box(-1.0, 1.0, (1,), np.float32), spaces.Box(-1.0, 1.0, (1,), np.float32))
        self.rng = np.random.default_rng(seed)

    def has_attr(self, attr_name: str) -> bool:
        return hasattr(self, attr_name)

    def reset(self) -> Any:
        self.state = self.rng.uniform(-1.0, 1.0, (self.num_envs, 1)).astype(np.float32)
        return self.state

    def step_async(self, actions: Any) -> None:
        self.rewards = -((np.asarray(actions, np.float64) - np.tanh(25.0 * self.state))[:, 0] ** 2)

    def step_wait(self) -> Any:
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        return self.reset(), self.rewards, np.ones(self.num_envs, np.bool_), infos


class Sizing(OneShot):
    """Each of `length` steps earns a X - a^2 / 2 with X ~ N(mean, std^2) and 0 <= a <= most; only time is seen."""

    def __init__(
        self, n_envs: int, seed: int, mean: float = 0.5, std: float = 0.2, length: int = 1, most: float = 1.0
    ) -> None:
        super().__init__(n_envs, spaces.Box(-1.0, 1.0, (1,), np.float32), spaces.Box(0.0, most, (1,), np.float32))
        self.mean, self.std, self.length = mean, std, length
        self.rng, self.clock = np.random.default_rng(seed), 0

    def reset(self) -> Any:
        self.clock = 0
        return self.time()

    def time(self) -> NDArray[np.float32]:
        return np.full((self.num_envs, 1), self.clock / self.length, np.float32)

    def step_async(self, actions: Any) -> None:
        self.size = np.asarray(actions, np.float64)[:, 0]

    def step_wait(self) -> Any:
        rewards = self.size * self.rng.normal(self.mean, self.std, self.num_envs) - 0.5 * self.size**2
        self.clock += 1
        over = self.clock >= self.length
        obs = self.reset() if over else self.time()
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        return obs, rewards, np.full(self.num_envs, over), infos


def vectorized(make: Any, n_envs: int, seed: int = 0) -> VecEnv:
    """n copies of an environment behind SB3's DummyVecEnv, with SB3's Monitor."""
    return make_vec_env(make, n_envs, seed=seed, vec_env_cls=DummyVecEnv)
