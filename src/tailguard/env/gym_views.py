"""The same environment for code that speaks Gymnasium: one `Env`, or N as a `VectorEnv`."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from tailguard.env.observation import Observation
from tailguard.env.vec_env import TradingVecEnv
from tailguard.errors import ConfigError

Info = dict[str, Any]


class TradingEnv(gym.Env[Observation, npt.NDArray[np.float32]]):
    """One environment: a view of a `TradingVecEnv` with n_envs=1."""

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012  Gymnasium declares it so

    def __init__(self, vec_env: TradingVecEnv) -> None:
        if vec_env.num_envs != 1:
            raise ConfigError(
                f"TradingEnv shows one environment, this one has {vec_env.num_envs}; use TradingVectorEnv."
            )
        self.vec_env = vec_env
        self.observation_space = vec_env.observation_space
        self.action_space = vec_env.action_space

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Observation, Info]:
        super().reset(seed=seed)
        if seed is not None:
            self.vec_env.seed(seed)
        return self.vec_env.reset()[0], {}

    def step(self, action: npt.NDArray[np.float32]) -> tuple[Observation, float, bool, bool, Info]:
        observations, _, dones, infos = self.vec_env.step(np.asarray(action)[None])
        observation, info = observations[0], infos[0]
        truncated = bool(info.pop("TimeLimit.truncated", False))
        observation = info.pop("terminal_observation", observation)
        return observation, float(self.vec_env.rewards[0]), bool(dones[0]) and not truncated, truncated, info


class TradingVectorEnv(VectorEnv[Observation, npt.NDArray[np.float32], npt.NDArray[Any]]):
    """N environments in Gymnasium's vector interface; an episode that ends starts again in the same step."""

    metadata: dict[str, Any] = {"render_modes": [], "autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012

    def __init__(self, vec_env: TradingVecEnv) -> None:
        self.vec_env = vec_env
        self.num_envs = vec_env.num_envs
        self.single_observation_space = vec_env.observation_space
        self.single_action_space = vec_env.action_space
        self.observation_space = batch_space(vec_env.observation_space, self.num_envs)
        self.action_space = batch_space(vec_env.action_space, self.num_envs)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: Info | None = None
    ) -> tuple[Observation, Info]:
        if isinstance(seed, int):
            self.vec_env.seed(seed)
        elif seed is not None:
            self.vec_env._seeds = list(seed)
        return self.vec_env.reset(), {}

    def step(
        self, actions: npt.NDArray[np.float32]
    ) -> tuple[Observation, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], Info]:
        observations, _, dones, infos = self.vec_env.step(actions)
        info: Info = {
            name: np.array([one[name] for one in infos], dtype=np.float64) for name in ("equity", "costs", "turnover")
        }
        info["valid"] = np.array([one.get("valid", True) for one in infos], dtype=np.bool_)
        truncated = np.array([one.get("TimeLimit.truncated", False) for one in infos], dtype=np.bool_)
        if dones.any():
            last = np.full(self.num_envs, None, dtype=object)
            for n in np.flatnonzero(dones).tolist():
                last[n] = infos[n]["terminal_observation"]
            info["final_obs"], info["_final_obs"] = last, dones.copy()
            info["final_info"] = {"episode": {k: self._last(infos, k) for k in ("r", "l")}}
            info["_final_info"] = dones.copy()
        return observations, self.vec_env.rewards.copy(), dones & ~truncated, truncated, info

    @staticmethod
    def _last(infos: list[Info], key: str) -> npt.NDArray[np.float64]:
        """(N,) a field of `episode`, 0 where the episode goes on."""
        return np.array([one.get("episode", {}).get(key, 0.0) for one in infos], dtype=np.float64)

    def close_extras(self, **kwargs: Any) -> None:
        """Nothing is open."""
