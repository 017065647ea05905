"""Backtests: a deterministic policy over a stretch of bars, its benchmarks, and the same decisions at other costs.

Every figure comes from one accounting, `tailguard.env`: the one the agent was trained with. Stress tests replay the
recorded decisions (target weights) through it, so nothing but the cost or the delay differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tailguard.env import (
    AccountRules,
    Costs,
    Replay,
    TradingVecEnv,
    follow,
    limits_of,
    replay,
    requested_weights,
    sequential,
)
from tailguard.env.no_trade import inside
from tailguard.env.replay import Policy
from tailguard.errors import ConfigError
from tailguard.evaluation import measures
from tailguard.market import Bars

Array = npt.NDArray[np.float64]

BPS = 1e-4
MAX_BREAK_EVEN_BPS = 10_000.0
QUANTILE_ROWS = 2_000


@dataclass(frozen=True)
class Backtest:
    """What an account did bar by bar. Row s: decided at the close of bar first + s, earned by the close of the next."""

    symbols: tuple[str, ...]
    bars_per_year: float
    first: int
    """Bar of the first decision, in the bars it was run on."""
    decided_at: npt.NDArray[np.datetime64]
    """(S,) UTC, the close at which the row's decision was made."""
    fill_at: npt.NDArray[np.datetime64]
    """(S,) UTC, the open at which it is filled: the `ts` of the bar in which the row's return is earned."""
    returns: Array
    """(S,) simple, net of costs."""
    costs: Array
    """(S,) paid, as a part of the equity before the row."""
    turnover: Array
    """(S,) notional traded over equity."""
    weights: Array
    """(S, A) held at the end of the row."""
    targets: Array
    """(S, A) what the policy answered at its beginning, before bounds, gross cap and band: stress tests replay it. An
    evaluation that was read from its files has `requested` here."""
    requested: Array
    """(S, A) weights that the account was asked to hold at its beginning, after bounds, gross cap and band; NaN after
    ruin, when there is no account to ask."""
    quantiles: Array | None = None
    """(S, Q) of the return from here on that the critics predicted at its beginning, in reward units; NaN where they
    were not asked."""

    def __len__(self) -> int:
        return len(self.returns)

    @property
    def equity(self) -> Array:
        """(S + 1,) growth of one unit."""
        return measures.equity_curve(self.returns)

    @property
    def cost_bps(self) -> float:
        """Paid per unit traded, on average, in basis points; holding costs are included."""
        traded = float(self.turnover.sum())
        return float(self.costs.sum()) / traded / BPS if traded > 0.0 else 0.0

    @property
    def turnover_per_year(self) -> float:
        return float(self.turnover.mean()) * self.bars_per_year if len(self) else 0.0


class Recorder:
    """A policy that keeps what it answered; the one inside does the thinking.

    quantiles_every: how often the critics are asked for their quantiles too, in steps; 0 for never
    """

    def __init__(self, policy: Policy, quantiles_every: int = 0) -> None:
        self.policy, self.every = policy, quantiles_every
        self.actions: list[npt.NDArray[Any]] = []
        self.quantiles: dict[int, npt.NDArray[Any]] = {}

    def predict(
        self, observation: Any, state: Any = None, episode_start: Any = None, deterministic: bool = True
    ) -> tuple[npt.NDArray[Any], Any]:
        step, read = len(self.actions), getattr(self.policy, "predict_quantiles", None)
        if self.every and read is not None and step % self.every == 0:
            self.quantiles[step] = read(observation, state, episode_start)[0]
        predict = getattr(self.policy, "predict", None)
        if predict is None:
            action, after = self.policy(observation), None  # type: ignore[operator]
        else:
            action, after = predict(observation, state=state, episode_start=episode_start, deterministic=deterministic)
        self.actions.append(np.asarray(action, dtype=np.float64).reshape(-1))
        return np.asarray(action), after

    def quantile_rows(self, skip: int) -> Array | None:
        """(S, Q) after the first `skip` steps, NaN where the critics were not asked; None if they never were."""
        found = {step - skip: law for step, law in self.quantiles.items() if step >= skip}
        if not found:
            return None
        rows = np.full((len(self.actions) - skip, len(next(iter(found.values())))), np.nan)
        for step, law in found.items():
            rows[step] = law
        return rows


def backtest(
    env: TradingVecEnv,
    policy: Policy,
    start: int,
    stop: int,
    *,
    warm_up: int = 0,
    with_quantiles: bool = False,
) -> Backtest:
    """Decide at the closes of bars start .. stop - 1 with the costs and rules of `env`, from cash, deterministically.

    policy:  a model with SB3's `predict`, or a function of observations
    warm_up: bars before `start` that the policy watches without trading, so that a recurrent one has a memory
    with_quantiles: also ask a model's `predict_quantiles`, at about two thousand bars spread over the stretch
    """
    if not (0 <= start - warm_up <= start < stop < len(env.bars)):
        raise ConfigError(
            f"A backtest of bars {start} to {stop} with a warm-up of {warm_up} does not fit {len(env.bars)} bars: it "
            f"needs {warm_up} bars before and one after."
        )
    recorder = Recorder(policy, max(1, (stop - start) // QUANTILE_ROWS) if with_quantiles else 0)
    replay(sequential(env, start - warm_up, stop + 1), recorder, stop - start, warm_up=warm_up)
    targets = np.stack(recorder.actions[warm_up:])
    result = follow_targets(env.bars, targets, start, costs=env.config.costs, account=env.config.account)
    return replace(result, quantiles=recorder.quantile_rows(warm_up))


def backtest_periods(env: TradingVecEnv, policy: Policy, start: int, stop: int, period: int) -> Backtest:
    """Like `backtest` for a policy that sees the time left of its episode: one episode of `period` bars after another.

    Each episode decides from cash with a fresh memory, as in training; the decisions are then followed by one account
    from the first to the last bar, which carries its positions over. Only whole periods are run.
    """
    n_periods = (stop - start) // period
    if n_periods < 1:
        raise ConfigError(f"Bars {start} to {stop} do not hold one period of {period} bars.")
    several = TradingVecEnv(
        env.bars,
        env._rows.reshape(len(env.bars), len(env.bars.symbols), -1),
        env.feature_names,
        n_envs=n_periods,
        look_back=env.look_back,
        starts=start + period * np.arange(n_periods),
        config=env.config.replace(episode_length=period),
    )
    recorder = Recorder(policy)
    replay(several, recorder, period)
    by_step = np.stack(recorder.actions).reshape(period, n_periods, -1)
    targets = by_step.swapaxes(0, 1).reshape(period * n_periods, -1)
    return follow_targets(env.bars, targets, start, costs=env.config.costs, account=env.config.account)


def follow_targets(
    bars: Bars,
    targets: npt.ArrayLike,
    first: int,
    *,
    costs: Costs,
    account: AccountRules,
    orders: npt.NDArray[np.bool_] | None = None,
) -> Backtest:
    """The backtest of decisions that are already known: target weights (S, A) from bar `first` on."""
    wanted = np.asarray(targets, dtype=np.float64)
    record = follow(bars, wanted, first=first, costs=costs, account=account, orders=orders)
    equity = np.maximum(record.equity[:, 0], 0.0)  # a debt beyond ruin is a loss of everything
    before = np.concatenate([[account.initial_cash], equity[:-1]])
    solvent = before > 0.0
    return Backtest(
        symbols=bars.symbols,
        bars_per_year=bars.bars_per_year,
        first=first,
        decided_at=bars.ts[first : first + len(equity)] + bars.step,
        fill_at=bars.ts[first + 1 : first + 1 + len(equity)],
        returns=np.divide(equity, before, out=np.ones_like(equity), where=solvent) - 1.0,
        costs=np.divide(record.costs[:, 0], before, out=np.zeros_like(equity), where=solvent),
        turnover=record.turnover[:, 0],
        weights=record.weights[:, 0],
        targets=wanted,
        requested=requested_of(bars, wanted, record, first, account, orders),
    )


def requested_of(
    bars: Bars,
    targets: Array,
    record: Replay,
    first: int,
    account: AccountRules,
    orders: npt.NDArray[np.bool_] | None = None,
) -> Array:
    """(S, A) weights that an account was asked to hold by `targets`, from the record of following them.

    Without an order, in a no-trade window, or without a price to size an order by, it is what was held; after ruin NaN.
    """
    fills = bars.ts[first + 1 : first + 1 + len(targets)]
    held = np.concatenate([np.zeros_like(targets[:1]), record.weights[:-1, 0]])
    ordered = np.logical_or.accumulate(bars.tradable, axis=0)[first : first + len(targets)]
    ordered = ordered & ~inside(fills, account.no_trade_windows)[:, None]
    if orders is not None:
        ordered = ordered & orders[:, None]
    requested = np.where(ordered, requested_weights(targets, held, limits_of(account)), held)
    requested[np.flatnonzero(record.done[:, 0])[0] + 1 :] = np.nan
    return requested


def weights_frame(own: Backtest) -> pl.DataFrame:
    """What the account was asked to hold, for another backtester: `decided_at`, `fill_at`, `symbol`, `weight`.

    One row per decision and symbol, in this order. `fill_at` is the `ts` of the bar at whose open the weight is bought.
    """
    asked = np.isfinite(own.requested).all(axis=1)
    n_rows, n_assets = int(asked.sum()), len(own.symbols)
    return pl.DataFrame(
        {
            "decided_at": stamp_column(np.repeat(own.decided_at[asked], n_assets)),
            "fill_at": stamp_column(np.repeat(own.fill_at[asked], n_assets)),
            "symbol": pl.Series(list(own.symbols) * n_rows, dtype=pl.String),
            "weight": own.requested[asked].reshape(-1),
        }
    )


def stamp_column(stamps: npt.NDArray[np.datetime64]) -> pl.Series:
    """UTC stamps as a column of the type that the `ts` of bars has, so that the two can be joined."""
    return pl.Series(stamps.astype("datetime64[ms]")).dt.replace_time_zone("UTC")


# --- benchmarks


def buy_and_hold(bars: Bars, first: int, n_steps: int, *, costs: Costs, account: AccountRules) -> Backtest:
    """Equal parts of what can be bought at the first fill, with the strategy's costs, then left alone."""
    listed = bars.tradable[: first + 1].any(axis=0) & bars.tradable[first + 1]
    targets = np.zeros((n_steps, len(bars.symbols)))
    targets[0, listed] = 1.0 / max(int(listed.sum()), 1)
    orders = np.zeros(n_steps, dtype=np.bool_)
    orders[0] = True
    rules = account.replace(gross_cap=1.0, no_trade_band=0.0, no_trade_windows=(), long_only=True)
    return follow_targets(bars, targets, first, costs=costs, account=rules, orders=orders)


def volatility_matched(benchmark: Backtest, strategy: Backtest) -> Backtest:
    """The benchmark held with the part (or the multiple) of equity that gives it the strategy's volatility.

    Cash and loans are free here, so its Sharpe ratio is that of the benchmark: what differs is the size of the bet.
    """
    own = measures.annual_volatility(strategy.returns, strategy.bars_per_year)
    other = measures.annual_volatility(benchmark.returns, benchmark.bars_per_year)
    size = own / other if other > 0.0 else 0.0
    return replace(
        benchmark,
        returns=np.maximum(size * benchmark.returns, -1.0),
        weights=size * benchmark.weights,
        costs=size * benchmark.costs,
        turnover=size * benchmark.turnover,
    )


# --- stress


@dataclass(frozen=True)
class Stress:
    """The same decisions under other conditions."""

    name: str
    cost_multiple: float
    delay_bars: int
    result: Backtest


def scaled_costs(costs: Costs, factor: float) -> Costs:
    """Every cost times `factor`; the window over which impact is measured stays."""
    return costs.replace(
        **{name: getattr(costs, name) * factor for name in Costs.model_fields if name != "impact_window"}
    )


def cost_stress(
    bars: Bars, base: Backtest, *, costs: Costs, account: AccountRules, multiples: Sequence[float] = (0, 1, 2, 4)
) -> tuple[Stress, ...]:
    """The decisions of `base` at multiples of the costs, and once with every decision one bar late."""
    found = [
        Stress(f"{multiple:g} x costs", float(multiple), 0, _again(bars, base, scaled_costs(costs, multiple), account))
        for multiple in multiples
    ]
    late = np.concatenate([np.zeros_like(base.targets[:1]), base.targets[:-1]])
    delayed = follow_targets(bars, late, base.first, costs=costs, account=account)
    return (*found, Stress("one bar late", 1.0, 1, delayed))


def break_even_bps(bars: Bars, base: Backtest, account: AccountRules) -> float | None:
    """Cost per unit traded, in basis points, at which the decisions would have earned nothing.

    0 when they lose money without any cost, 10,000 when no cost up to 100 % ends the profit, None without a trade.
    """
    if not base.turnover.any():
        return None

    def growth(fee_bps: float) -> float:
        free = Costs(fee_bps=fee_bps, half_spread_bps=0, slippage_bps=0, impact=0, borrow_bps_per_year=0)
        return measures.total_return(_again(bars, base, free, account).returns)

    if growth(0.0) <= 0.0:
        return 0.0
    low, high = 0.0, 1.0
    while growth(high) > 0.0:
        low, high = high, 4.0 * high
        if high > MAX_BREAK_EVEN_BPS:
            return MAX_BREAK_EVEN_BPS
    while high - low > 1e-3 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if growth(middle) > 0.0 else (low, middle)
    return 0.5 * (low + high)


def _again(bars: Bars, base: Backtest, costs: Costs, account: AccountRules) -> Backtest:
    return follow_targets(bars, base.targets, base.first, costs=costs, account=account)
