"""Run a policy over a stretch of bars in order, once: how evaluation and backtests trade."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tailguard.env import kernel
from tailguard.env.accounting import AccountRules, limits_of
from tailguard.env.costs import Costs, cost_rates
from tailguard.env.observation import Observation
from tailguard.env.rewards import log_growth
from tailguard.env.tape import tape_of
from tailguard.env.vec_env import TradingVecEnv
from tailguard.errors import ConfigError
from tailguard.market import Bars

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


def follow(
    bars: Bars,
    targets: npt.ArrayLike,
    *,
    first: int,
    costs: Costs,
    account: AccountRules,
    orders: npt.NDArray[np.bool_] | None = None,
) -> Replay:
    """One account told target weights (S, A) at the closes of bars first .. first + S - 1, by the same accounting.

    orders: (S,) bars at which orders are sent; on the others the position is left alone. All by default.

    After ruin there is nothing to trade with: the equity stays and the weights are zero.
    """
    wanted = np.ascontiguousarray(targets, dtype=np.float64)
    n_steps, n_assets = wanted.shape
    if n_assets != len(bars.symbols) or not 0 <= first <= first + n_steps < len(bars):
        raise ConfigError(
            f"targets of shape {wanted.shape} from bar {first} do not fit {len(bars)} bars of {len(bars.symbols)} "
            f"symbols: the last decision needs one more bar to be filled."
        )
    tape, limits = tape_of(bars, costs, account.no_trade_windows), limits_of(account)
    if orders is not None:
        sent = np.zeros(len(bars), dtype=np.bool_)
        sent[first + 1 : first + 1 + n_steps] = orders
        tape = tape._replace(fillable=np.ascontiguousarray(tape.fillable & sent[:, None]))
    rates = cost_rates(costs, bars.bars_per_year)
    record, held, taken = kernel.follow(first, wanted, float(account.initial_cash), tape, rates, limits)
    record[taken:, 0] = record[taken - 1, 0] if taken else account.initial_cash
    equity = record[:, :1]
    before = np.concatenate([[[float(account.initial_cash)]], equity[:-1]])
    reward = np.zeros_like(equity)
    reward[:taken] = log_growth(before[:taken], equity[:taken], account.initial_cash)
    done = np.zeros((n_steps, 1), dtype=np.bool_)
    done[taken - 1 : taken] = True
    return Replay(
        bar=first + 1 + np.arange(n_steps)[:, None],
        reward=reward,
        equity=equity,
        costs=record[:, 1:2],
        fees=record[:, 3:4],
        turnover=record[:, 2:3],
        weights=held[:, None],
        done=done,
    )


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
