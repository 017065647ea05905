"""Checks of the market side: look-ahead, costs, a planted signal, and returns in which there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailguard.doctor.checks import Check, Verdict, healthy, judged, not_applicable, sick
from tailguard.doctor.environment import walk
from tailguard.doctor.patient import Market, Patient
from tailguard.env import Costs, TradingVecEnv
from tailguard.env.dataset import check_bars
from tailguard.env.replay import replay, sequential
from tailguard.market import Bars
from tailguard.market.check import DataReport
from tailguard.market.problems import Severity

Floats = NDArray[np.floating[Any]]

N_STEPS = 200
LEARNING_STEPS = 150_000
ENOUGH_BARS = 1_000  # to train on one half and look at the other
PLANTED = 0.5  # correlation of the planted feature with the next return
NO_MARKET = "the environment is not one of ours, so its bars are out of sight"


def rewritten(bars: Bars, first: int, rng: np.random.Generator) -> Bars:
    """The same bars up to `first`, another future from there on."""
    factor = np.ones_like(bars.close)
    factor[first:] = np.exp(np.cumsum(rng.normal(0.0, 0.02, factor[first:].shape), 0))
    return with_prices(bars, bars.open * factor, bars.high * factor, bars.low * factor, bars.close * factor)


def with_prices(bars: Bars, open_: Floats, high: Floats, low: Floats, close: Floats) -> Bars:
    """Bars of the same clock and symbols with other prices."""
    return Bars.from_arrays(
        bars.ts, bars.symbols, open_, high, low, close, bars.volume, bars.tradable, extras=bars.extras, step=bars.step
    )


def on_market(examine: Callable[[Patient, Market], Verdict], n_bars: int = 0) -> Callable[[Patient], Verdict]:
    """A check of the market behind the environment; not applicable where there is none, or too little of it."""

    def check(patient: Patient) -> Verdict:
        if patient.market is None:
            return not_applicable(NO_MARKET)
        if len(patient.market.bars) < n_bars:
            return not_applicable(f"fewer than {n_bars:,} bars")
        return examine(patient, patient.market)

    return check


def look_ahead(patient: Patient, market: Market) -> Verdict:
    env = market.env(market.bars, 1, 0)
    start = env.first
    cut = min(start + N_STEPS, len(market.bars) - 2)
    changed = market.env(rewritten(market.bars, cut, np.random.default_rng(0)), 1, 0)
    actions = patient.actions(1, cut - start - 1, 0)
    before, after = (walk(sequential(each, start, cut + 1), actions) for each in (env, changed))  # ends at cut - 1
    worst = np.flatnonzero((before.observations != after.observations).any((1, 2)))
    paid = np.flatnonzero((before.rewards != after.rewards).any(1))
    if len(worst) or len(paid):
        where = f"bar {start + int(min([*worst, *paid]))} of {cut}"
        names = [env.layout.names[k] for k in np.flatnonzero((before.observations != after.observations).any((0, 1)))]
        what = ", ".join(names[:3]) or "reward"
        return sick(
            f"rewriting the bars from {cut} on changes what is seen or earned at {where}: {what}",
            "A feature or a fill uses bars that were not known yet: shift it, or compute it on the past alone.",
        )
    return healthy(f"{cut - start} steps before a rewritten future are bit-identical")


def zero_weights(patient: Patient, market: Market) -> Verdict:
    env = market.env(market.bars, 1, 0)
    flat = replay(env, lambda obs: np.zeros((len(obs), len(market.bars.symbols))), min(N_STEPS, env.length))
    gained = float(np.abs(flat.reward).max())
    return judged(gained == 0.0, f"holding nothing earns {gained:.1e} at most", "Cash must neither grow nor shrink.")


def costs(patient: Patient, market: Market) -> Verdict:
    env = market.env(market.bars, 1, 0)
    rng = np.random.default_rng(0)
    turned = replay(
        env, lambda obs: rng.uniform(-1.0, 1.0, (len(obs), len(market.bars.symbols))), min(N_STEPS, env.length)
    )
    paid = float((turned.costs / turned.equity).sum())
    traded = float(turned.turnover.sum())
    per_unit = 1e4 * paid / max(traded, 1e-12)
    if traded == 0.0:
        return sick("random weights trade nothing", "Look at the no-trade band and at `tradable`.")
    return judged(
        per_unit > 0.0,
        f"random trading pays {per_unit:.2f} bps per unit traded",
        "Trading is free: any agent that trades enough looks good. Set fee_bps, half_spread_bps or slippage_bps.",
    )


def data(patient: Patient, market: Market) -> Verdict:
    if market.data is None:
        return not_applicable("no data file")
    reports = check_bars(market.data)
    errors, warnings = listed(reports, "error"), listed(reports, "warning")
    files = "1 file" if len(reports) == 1 else f"{len(reports)} files"
    return judged(
        not errors,
        f"{files}, {sum(report.rows for report in reports):,} rows, errors: {', '.join(errors) or 'none'}, "
        f"warnings: {', '.join(warnings) or 'none'}",
        "Run `tailguard data check` on the file: it says which row, and how to fix it.",
    )


def listed(reports: list[DataReport], severity: Severity) -> list[str]:
    """Every kind of finding of that severity, once."""
    return sorted({code for report in reports for code in report.codes(severity)})


def shuffled(bars: Bars, rng: np.random.Generator) -> tuple[Bars, Floats]:
    """Bars whose returns are the same in another order, and those returns (T, A): nothing in them can be foreseen."""
    close = bars.close
    returns = np.zeros_like(close)
    returns[1:] = close[1:] / close[:-1] - 1.0
    returns = np.where(np.isfinite(returns), returns, 0.0)
    returns[1:] = rng.permutation(returns[1:] - returns[1:].mean(0))
    made = close[0] * np.cumprod(1.0 + returns, 0)
    opened = np.vstack([made[:1], made[:-1]])
    return with_prices(bars, opened, np.maximum(opened, made), np.minimum(opened, made), made), returns


def experiment(market: Market, planted: bool, seed: int) -> tuple[TradingVecEnv, TradingVecEnv]:
    """Training and test environment on shuffled returns, with one feature that foresees the next return or does not."""
    rng = np.random.default_rng(seed)
    bars, returns = shuffled(market.bars, rng)
    spread = np.maximum(returns.std(0), 1e-12)
    foreseen = np.vstack([returns[1:], returns[:1]]) / spread if planted else rng.standard_normal(returns.shape)
    feature = PLANTED * foreseen + np.sqrt(1.0 - PLANTED**2) * rng.standard_normal(returns.shape)
    like, half = market.env(market.bars, 1, seed), len(bars) // 2
    options: dict[str, Any] = {
        "features": feature[..., None].astype(np.float32),
        "feature_names": ("planted",),
        "config": like.config.replace(episode_length=min(100, half - 2), costs=affordable(returns)),
        "seed": seed,
    }
    train = TradingVecEnv(bars, n_envs=32, window=(0, half), **options)
    test = TradingVecEnv(bars, n_envs=1, window=(half, len(bars)), **options)
    return train, test


def affordable(returns: Floats) -> Costs:
    """A tenth of a bar's usual move per unit traded: costs matter, and a strong signal pays for them."""
    fee = 1e3 * float(np.abs(returns).mean())
    return Costs(fee_bps=fee, half_spread_bps=0.0, slippage_bps=0.0, impact=0.0, borrow_bps_per_year=0.0)


def earned(patient: Patient, market: Market, planted: bool) -> tuple[float, float]:
    """Reward per bar out of sample and its standard error, of an agent trained on the experiment above."""
    train, test = experiment(market, planted, seed=0)
    agent = patient.agent(train, n_steps=64, sequence_length=16, gamma=0.5, gae_lambda=0.9, n_epochs=4)
    agent.learn(LEARNING_STEPS)
    half = len(test.bars) // 2
    rewards = replay(sequential(test, half, len(test.bars)), agent).reward[:, 0]
    return float(rewards.mean()), float(rewards.std(ddof=1)) / np.sqrt(len(rewards))


def planted_signal(patient: Patient, market: Market) -> Verdict:
    mean, error = earned(patient, market, planted=True)
    return judged(
        mean > 3.0 * error,
        f"a planted signal earns {1e4 * mean:.2f} +- {1e4 * error:.2f} bps per bar out of sample",
        "The learner cannot use even a strong signal under these settings: look at the learning rate and the alerts.",
    )


def permuted_returns(patient: Patient, market: Market) -> Verdict:
    mean, error = earned(patient, market, planted=False)
    return judged(
        mean <= 3.0 * error,
        f"on shuffled returns it earns {1e4 * mean:.2f} +- {1e4 * error:.2f} bps per bar out of sample",
        "Something foresees the future: where nothing can be foreseen nothing may be earned.",
    )


CHECKS = (
    Check("market/data", "Do the files pass the data check?", on_market(data)),
    Check("market/look_ahead", "Is the past blind to a rewritten future?", on_market(look_ahead)),
    Check("market/zero_weights", "Does holding nothing earn nothing?", on_market(zero_weights)),
    Check("market/costs", "Does trading cost something?", on_market(costs)),
    Check("market/planted_signal", "Is a planted signal found?", on_market(planted_signal, ENOUGH_BARS)),
    Check("market/permuted_returns", "Is nothing earned where nothing is?", on_market(permuted_returns, ENOUGH_BARS)),
)
