"""TradingVecEnv: N accounts on the same bars, stepped together, behind Stable-Baselines3's `VecEnv`."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from stable_baselines3.common.vec_env import VecEnv

from tailguard.configuration import Config, PositiveInt
from tailguard.env import kernel
from tailguard.env.accounting import AccountRules, limits_of
from tailguard.env.costs import Costs, cost_rates
from tailguard.env.episodes import uniform_integers
from tailguard.env.observation import (
    AGENT_STATE,
    AgentState,
    Observation,
    feature_rows,
    layout_of,
)
from tailguard.env.rewards import least_equity
from tailguard.env.tape import tape_of
from tailguard.errors import ConfigError, NonFiniteError, StateError
from tailguard.market import Bars
from tailguard.market.features import CLOCKS
from tailguard.stateful import require_keys

Infos = list[dict[str, Any]]
Ints = npt.NDArray[np.int64]


class EnvConfig(Config):
    """Everything about a trading environment that is not data."""

    episode_length: PositiveInt | None = 250
    """Steps of an episode; None runs from the first to the last bar of the window."""
    random_start: bool = True
    """Episodes start anywhere in the window; otherwise each starts at its first usable bar."""
    costs: Costs = Costs()
    account: AccountRules = AccountRules()
    agent_state: tuple[AgentState, ...] = AGENT_STATE
    """Which parts of the account the agent sees."""


class TradingVecEnv(VecEnv):
    """Trade target weights on bars; see docs/environment.md for timing, costs and the observation.

    bars:          the market, (T, A)
    features:      (T, A, F), row t known at the close of bar t; None shows the account only
    feature_names: F names
    look_back:     bars before which the features are not complete; no episode starts there
    window:        (first, stop) bars that episodes may use, the last close being that of bar stop - 1
    starts:        (n_envs,) bars at which every episode of each environment starts, instead of drawing them
    seed:          environment n draws its starts from seed + n, so it starts as it would alone

    `step` gives per environment an info with `equity`, `costs` and `turnover` of the step, `valid=False` where no order
    could be filled in it (no-trade windows, no asset with a bar), so that the action is not learned from, and at an
    episode's end `terminal_observation`, `TimeLimit.truncated` and `episode` {r, l, t}. The same as arrays: `equity`,
    `costs`, `fees`, `turnover` (N,), `weights` (N, A), `rewards` (N,) in full precision.
    """

    render_mode: str | None = None

    def __init__(
        self,
        bars: Bars,
        features: npt.ArrayLike | None = None,
        feature_names: Sequence[str] | None = None,
        *,
        n_envs: int = 1,
        look_back: int = 0,
        window: tuple[int, int] | None = None,
        starts: npt.ArrayLike | None = None,
        seed: int = 0,
        config: EnvConfig | None = None,
    ) -> None:
        self.bars, self.config, self.look_back = bars, config or EnvConfig(), look_back
        if features is None:
            features, feature_names = np.zeros((*bars.tradable.shape, 0), dtype=np.float32), ()
        self._rows = feature_rows(features, bars, look_back)
        self.feature_names = tuple(feature_names or (f"feature{i}" for i in range(np.shape(features)[2])))
        if len(self.feature_names) != np.shape(features)[2]:
            raise ConfigError(f"{len(self.feature_names)} names for {np.shape(features)[2]} features.")
        self._tape = tape_of(bars, self.config.costs, self.config.account.no_trade_windows)
        self._no_fill: npt.NDArray[np.bool_] = ~np.any(self._tape.fillable, axis=1, keepdims=True)[:, 0]  # (T,)
        self._some_no_fill = bool(self._no_fill[1:].any())
        self._limits = limits_of(self.config.account)
        self._cash = float(self.config.account.initial_cash)
        self.first, self.length, self._n_starts = episode_plan(window or (0, len(bars)), look_back, self.config)
        self._rates = cost_rates(self.config.costs, bars.bars_per_year)
        self._least_equity = least_equity(self._cash)
        self._starts = None if starts is None else checked_starts(starts, n_envs, self.first, self._n_starts)
        self._digest: str | None = None
        n_assets = len(bars.symbols)
        self.layout = layout_of(bars.symbols, self.feature_names, self.config.agent_state)
        if self.layout.size == 0:
            raise ConfigError("The observation is empty. Give features, or leave agent_state at its default.")
        super().__init__(
            n_envs,
            gym.spaces.Box(-np.inf, np.inf, (self.layout.size,), np.float32),
            gym.spaces.Box(-1.0 if self._limits.lowest < 0 else 0.0, 1.0, (n_assets,), np.float32),
        )
        self._began = time.monotonic()
        self._actions = np.zeros((n_envs, n_assets))
        self._seed = np.arange(seed, seed + n_envs, dtype=np.int64)
        self._episode = np.full(n_envs, -1, dtype=np.int64)  # the first reset makes it 0
        self._accounts = kernel.new_accounts(self._cash, n_envs, n_assets)
        self._left = self._accounts.t.copy()  # bars that the last step left
        self.rewards = np.zeros(n_envs)
        self._begin(np.arange(n_envs))

    # what the accounts look like now

    @property
    def equity(self) -> npt.NDArray[np.float64]:
        """(N,) at the close of the current bar."""
        row: npt.NDArray[np.float64] = self._accounts.result[0]
        return row

    @property
    def costs(self) -> npt.NDArray[np.float64]:
        """(N,) paid in the last step, in currency."""
        row: npt.NDArray[np.float64] = self._accounts.result[1]
        return row

    @property
    def fees(self) -> npt.NDArray[np.float64]:
        """(N,) the part of `costs` that is commission."""
        row: npt.NDArray[np.float64] = self._accounts.result[3]
        return row

    @property
    def turnover(self) -> npt.NDArray[np.float64]:
        """(N,) notional traded in the last step over equity."""
        row: npt.NDArray[np.float64] = self._accounts.result[2]
        return row

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """(N, A) held now."""
        held: npt.NDArray[np.float64] = self.units * self._tape.mark[self.t] / self.equity[:, None]
        return held

    @property
    def exogenous(self) -> npt.NDArray[np.float64]:
        """(N, A) relative price move of every asset in the last step: what no action changes (see `hindsight`)."""
        moves: npt.NDArray[np.float64] = self._tape.mark[self._left + 1] / self._tape.mark[self._left] - 1.0
        return moves

    @property
    def units(self) -> npt.NDArray[np.float64]:
        """(N, A) held now."""
        return self._accounts.units

    @property
    def t(self) -> Ints:
        """(N,) current bar of each environment."""
        return self._accounts.t

    @property
    def attackable(self) -> npt.NDArray[np.float64]:
        """(D,) 1 for what is computed from prices and volumes; 0 for the clock and for the account, which are known."""
        seen = [float(name not in CLOCKS) for _ in self.bars.symbols for name in self.feature_names]
        return np.array(seen + [0.0] * (self.layout.size - len(seen)))

    def observe(self) -> Observation:
        """(N, D) what the agents see now; `reset` and `step` return the same."""
        layout = self.layout
        return kernel.observe(self._accounts, self._rows, self._tape.mark, self.length, layout.columns, layout.size)

    # stepping

    def reset(self) -> Observation:
        """Every environment starts its next episode; after `seed(n)` the first one of that seed."""
        for n, seed in enumerate(self._seeds):
            if seed is not None:
                self._seed[n], self._episode[n] = seed, -1
        self._reset_seeds()
        self._reset_options()
        self._begin(np.arange(self.num_envs))
        self.reset_infos = [{} for _ in range(self.num_envs)]
        return self.observe()

    def step(
        self, actions: npt.NDArray[Any]
    ) -> tuple[Observation, npt.NDArray[np.float32], npt.NDArray[np.bool_], Infos]:
        self.step_async(actions)
        return self.step_wait()

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        wanted = np.ascontiguousarray(actions, dtype=np.float64).reshape(self._actions.shape)
        if not np.isfinite(wanted).all():
            n, a = (int(i) for i in np.argwhere(~np.isfinite(wanted))[0])
            raise NonFiniteError(
                f"Action of environment {n} for {self.bars.symbols[a]!r} is {wanted[n, a]} at bar {int(self.t[n])}; "
                f"a target weight must be a number. Look at the policy's output."
            )
        self._actions = wanted

    def step_wait(self) -> tuple[Observation, npt.NDArray[np.float32], npt.NDArray[np.bool_], Infos]:
        self._left = self.t.copy()
        growth, ended, n_ended = kernel.close_bar(
            self._accounts, self._actions, self._tape, self._rates, self._limits, self.length, self._least_equity
        )
        self.rewards = np.log(growth)  # not in the kernel: the last bit of a logarithm is the library's own
        self._accounts.period_return[:] += self.rewards
        observation, rewards = self.observe(), self.rewards.astype(np.float32)
        infos: Infos = [
            {"equity": worth, "costs": costs, "turnover": turnover}
            for worth, costs, turnover in zip(*self._accounts.result[:3].tolist(), strict=True)
        ]
        if self._some_no_fill:
            for i in np.flatnonzero(self._no_fill[self._left + 1]).tolist():
                infos[i]["valid"] = False
        if n_ended:
            observation = self._finish(ended[1], ended[0], observation, infos)
        return observation, rewards, ended[1], infos

    def _finish(
        self, done: npt.NDArray[np.bool_], ruined: npt.NDArray[np.bool_], last: Observation, infos: Infos
    ) -> Observation:
        """Describe the episodes that ended, start the next ones, and return the observations to act on."""
        accounts, ended = self._accounts, np.flatnonzero(done)
        elapsed = round(time.monotonic() - self._began, 6)
        for n in ended.tolist():
            infos[n]["terminal_observation"] = last[n].copy()
            infos[n]["TimeLimit.truncated"] = not ruined[n]
            infos[n]["episode"] = {"r": float(accounts.period_return[n]), "l": int(accounts.steps[n]), "t": elapsed}
        self._begin(ended)
        return self.observe()

    def _begin(self, which: npt.NDArray[np.intp]) -> None:
        """Start the next episode of the environments `which` with cash only."""
        self._episode[which] += 1
        accounts = self._accounts
        accounts.t[which] = self.first if self._starts is None else self._starts[which]
        if self.config.random_start and self._starts is None:
            accounts.t[which] += uniform_integers(self._seed[which], self._episode[which], self._n_starts)
        for array in (accounts.steps, accounts.units, accounts.entry, accounts.period_return):
            array[which] = 0
        accounts.cash[which] = accounts.result[0, which] = self._cash

    # saving

    def state_dict(self) -> dict[str, Any]:
        """Arrays, and a digest of the bars they belong to: enough to go on exactly."""
        return {
            "bars": self._bars_digest(),
            **{name: array.copy() for name, array in self._stores().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; `observe()` gives the observation to act on."""
        require_keys(self, state)
        mine = self.state_dict()
        if state["bars"] != mine.pop("bars"):
            raise StateError("This state was saved on other bars. Build the environment from the same data first.")
        for name, now in mine.items():
            saved = np.asarray(state[name])
            if saved.shape != now.shape:
                raise StateError(f"{name} has shape {saved.shape}, this environment needs {now.shape}: n_envs differs.")
        for name, target in self._stores().items():
            target[...] = np.asarray(state[name])

    def _stores(self) -> dict[str, npt.NDArray[Any]]:
        accounts = self._accounts._asdict()
        return {"seed": self._seed, "episode": self._episode, "step_result": accounts.pop("result"), **accounts}

    def _bars_digest(self) -> str:
        if self._digest is None:
            self._digest = self.bars.digest()
        return self._digest

    # the rest of SB3's interface: all environments live here, so attributes are those of this object

    def close(self) -> None:
        """Nothing is open."""

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self, attr_name) for _ in self._indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set for all: the environments share one object, so a subset cannot differ."""
        if len(list(self._indices(indices))) != self.num_envs:
            raise ConfigError(
                f"set_attr({attr_name!r}) on some environments only: they share one object. Set it for all."
            )
        setattr(self, attr_name, value)

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        method = getattr(self, method_name)
        return [method(*args, **kwargs) for _ in self._indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper[Any, Any, Any, Any]], indices: Any = None) -> list[bool]:
        """True for Monitor, because `info["episode"]` is already what it would add."""
        from stable_baselines3.common.monitor import Monitor

        return [issubclass(wrapper_class, Monitor) for _ in self._indices(indices)]

    def _indices(self, indices: Any) -> Iterable[int]:
        return self._get_indices(indices)


def episode_plan(window: tuple[int, int], look_back: int, config: EnvConfig) -> tuple[int, int, int]:
    """(first bar an episode may start at, its length in steps, number of possible starts)."""
    first, stop = max(window[0], look_back), window[1]
    usable = stop - 1 - first  # a step needs the next bar
    length = config.episode_length if config.episode_length is not None else usable
    if length < 1 or usable < length:
        raise ConfigError(
            f"The window {window} with a look-back of {look_back} leaves {max(usable, 0)} steps, and an episode has "
            f"{config.episode_length}. Use a longer window or a shorter episode_length."
        )
    return first, length, usable - length + 1


def checked_starts(starts: npt.ArrayLike, n_envs: int, first: int, n_starts: int) -> Ints:
    """One start per environment, each with room for a whole episode."""
    bars = np.asarray(starts, dtype=np.int64)
    if bars.shape != (n_envs,) or bars.min() < first or bars.max() >= first + n_starts:
        raise ConfigError(f"starts={bars.tolist()}: give {n_envs} bars in [{first}, {first + n_starts - 1}].")
    return bars
