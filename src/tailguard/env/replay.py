"""Run a policy over a stretch of bars in order, once: how evaluation and backtests trade."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tailguard.env.observation import Observation
from tailguard.env.vec_env import TradingVecEnv

Array = npt.NDArray[np.float64]


class Predictor(Protocol):
    """SB3's way to ask a model for actions, recurrent or not."""

    def predict(
        self,
        observation: Any,
        state: Any = None,
        episode_start: Any = None,
        deterministic: bool = False,
    ) -> tuple[npt.NDArray[Any], Any]: ...


Policy = Predictor | Callable[[Observation], npt.NDArray[Any]]


@dataclass(frozen=True)
class Replay:
    """What happened, time first. The first row is the first step: from the close of `first` to the next."""

    bar: npt.NDArray[np.int64]  # (S, N) bar whose close ends the step
    reward: Array  # (S, N)
    equity: Array  # (S, N) at that close
    costs: Array  # (S, N)
    fees: Array  # (S, N)
    turnover: Array  # (S, N)
    weights: Array  # (S, N, A) held after the step
    done: npt.NDArray[np.bool_]  # (S, N) the next row belongs to another episode

    def __len__(self) -> int:
        return len(self.reward)


def sequential(env: TradingVecEnv, first: int, stop: int) -> TradingVecEnv:
    """One environment like `env` that runs once from the close of bar `first` to the close of bar `stop` - 1."""
    n_assets = len(env.bars.symbols)
    return TradingVecEnv(
        env.bars,
        env._rows.reshape(len(env.bars), n_assets, -1),
        env.feature_names,
        look_back=env.look_back,
        window=(first, stop),
        config=env.config.replace(episode_length=None, random_start=False),
    )


def replay(env: TradingVecEnv, policy: Policy, n_steps: int | None = None, *, warm_up: int = 0) -> Replay:
    """Reset `env` and act for `n_steps` (an episode unless told), deterministically.

    policy:  a model with SB3's `predict`, or a function of observations
    warm_up: leading steps in which the policy sees the market but its orders are dropped, so that a recurrent policy
             has a memory when trading begins; they are not recorded
    """
    act = _actor(policy)
    n_steps = env.length - warm_up if n_steps is None else n_steps
    n_envs, n_assets = env.num_envs, len(env.bars.symbols)
    record = Replay(
        bar=np.empty((n_steps, n_envs), dtype=np.int64),
        **{name: np.empty((n_steps, n_envs)) for name in ("reward", "equity", "costs", "fees", "turnover")},
        weights=np.empty((n_steps, n_envs, n_assets)),
        done=np.empty((n_steps, n_envs), dtype=np.bool_),
    )
    observation = env.reset()
    start = np.ones(n_envs, dtype=np.bool_)
    for step in range(-warm_up, n_steps):
        bar = env.t + 1
        action = act(observation, start)
        observation, _, start, infos = env.step(action if step >= 0 else np.zeros((n_envs, n_assets)))
        if step >= 0:
            _write(record, step, env, bar, start, infos)
    return record


def _write(record: Replay, step: int, env: TradingVecEnv, bar: Any, done: Any, infos: list[dict[str, Any]]) -> None:
    """An ended episode has already been replaced by the next, so its equity comes from the info."""
    equity = np.where(done, [info["equity"] for info in infos], env.equity)
    values = {"bar": bar, "reward": env.rewards, "equity": equity, "costs": env.costs, "fees": env.fees}
    values |= {"turnover": env.turnover, "weights": env.weights, "done": done}
    for field in fields(record):
        getattr(record, field.name)[step] = values[field.name]


def _actor(policy: Policy) -> Callable[[Observation, npt.NDArray[np.bool_]], npt.NDArray[Any]]:
    """One way to call both kinds of policy; the recurrent state lives in the closure."""
    predict = getattr(policy, "predict", None)
    if predict is None:
        return lambda observation, _: policy(observation)  # type: ignore[operator]
    memory: list[Any] = [None]

    def act(observation: Observation, episode_start: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
        action, memory[0] = predict(observation, state=memory[0], episode_start=episode_start, deterministic=True)
        return np.asarray(action)

    return act
