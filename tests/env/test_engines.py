"""The money, replayed by two engines that share no code with ours: equity to 1e-9, fees equal.

Each engine lives in a virtual environment that the test builds once under ~/.cache/tailguard-tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_allclose

from tailguard.env import AccountRules, Costs, EnvConfig, TradingVecEnv, replay
from tailguard.evaluation.assessment import save
from tailguard.evaluation.backtest import follow_targets
from tailguard.examination import write_weights
from tailguard.market import Bars
from tests.evaluation.results import assessed
from tests.evaluation.test_weights import raw_actions
from tests.real_bars import real_frame

pytestmark = pytest.mark.slow

CACHE = Path(os.environ.get("TAILGUARD_TEST_CACHE", Path.home() / ".cache" / "tailguard-tests"))
PACKAGES = {"vectorbt": "vectorbt==1.2.0", "nautilus": "nautilus_trader==1.221.0"}

MARKETS = {
    "one asset": (["crypto/bitstamp_btcusd_1h_2018_2022"], 1e5),
    "currency with weekends": (["fx/eurusd_1h_ask_2017"], 1e5),
    "three assets, one with gaps": ([f"crypto/freqtrade_{name}btc_5m" for name in ("eth", "ltc", "ada")], 100.0),
}


def engine_python(engine: str) -> Path:
    """Python of the engine's own venv, built on first use."""
    home = CACHE / PACKAGES[engine].replace("==", "-")
    python = home / "bin" / "python"
    if not (home / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", PACKAGES[engine]], check=True)
        (home / ".ready").touch()
    return python


def load(names: list[str], n_bars: int = 1500) -> Bars:
    """The first bars of real files, side by side; skips where the data is not there."""
    return Bars(real_frame(*names, n_bars=n_bars))


def random_weights(n_bars: int, n_assets: int) -> np.ndarray:
    """(T, A) new targets at half of the bars, long and short, gross at most 0.8: vectorbt lends no cash."""
    rng = np.random.default_rng(0)
    weights = rng.uniform(-1, 1, (n_bars, n_assets)) * 0.8 / n_assets
    return np.where(rng.uniform(size=(n_bars, 1)) < 0.1, 0.0, weights)


@pytest.mark.parametrize("market", MARKETS)
@pytest.mark.parametrize("engine", PACKAGES)
def test_an_independent_engine_agrees(engine, market, tmp_path):
    names, cash = MARKETS[market]
    bars = load(names)
    costs = Costs(fee_bps=7.5, half_spread_bps=1.0, slippage_bps=2.0, impact=0.0, borrow_bps_per_year=0.0)
    config = EnvConfig(
        episode_length=None,
        random_start=False,
        costs=costs,
        account=AccountRules(initial_cash=cash, ruin_fraction=0.01),
    )
    env = TradingVecEnv(bars, config=config)
    weights = random_weights(*bars.close.shape)
    step = iter(weights)
    ours = replay(env, lambda _: next(step)[None])

    tape = env._tape  # the engines need a price at missing bars too, to value the position
    given, found = tmp_path / "given.npz", tmp_path / "found.npz"
    np.savez(
        given,
        open=tape.open,
        close=tape.mark,
        fillable=tape.fillable,
        weights=weights,
        fee=7.5e-4,
        adverse=3e-4,
        cash=cash,
    )
    script = Path(__file__).parent / "engines" / f"{engine}_replay.py"
    subprocess.run(
        [engine_python(engine), script, given, found], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    theirs = np.load(found)
    assert theirs["n_orders"] > 0.9 * len(bars)
    assert_allclose(theirs["equity"][1:], ours.equity[:, 0], rtol=1e-9)
    assert_allclose(theirs["fees"][1:], ours.fees[:, 0], rtol=1e-7, atol=1e-8 * cash * 1e-3)
    assert_allclose(theirs["fees"].sum(), ours.fees.sum(), rtol=1e-9)
    error = np.abs(theirs["equity"][1:] / ours.equity[:, 0] - 1.0).max()
    print(f"{engine}, {market}: {theirs['n_orders']} orders, largest relative difference of equity {error:.1e}")


EXPORTED = {
    "one asset, hourly": (["crypto/bitstamp_btcusd_1h_2018_2022"], AccountRules(gross_cap=0.8)),
    "one asset, daily": (["equity/sp500_1d_1999_2018"], AccountRules(gross_cap=0.8, no_trade_band=0.05)),
    "one asset, hourly with weekends": (["fx/eurusd_1h_ask_2017"], AccountRules(gross_cap=0.7, long_only=True)),
    "panel of 29 names, daily": (["equity/dj30_1d_2020_2021"], AccountRules(gross_cap=0.8, no_trade_band=0.02)),
    "panel, 5 minutes with gaps": (
        [f"crypto/freqtrade_{name}btc_5m" for name in ("eth", "ltc", "ada")],
        AccountRules(gross_cap=0.8, no_trade_band=0.02),
    ),
}


@pytest.mark.parametrize("market", EXPORTED)
def test_vectorbt_follows_exported_weights_to_the_reports_equity(market, tmp_path):
    """From the files alone, joined by label: `fill_at` of the weights with `ts` of the bars. vectorbt lends no cash."""
    names, account = EXPORTED[market]
    bars = load(names)
    costs = Costs(fee_bps=7.5, half_spread_bps=1.0, slippage_bps=2.0, impact=0.0, borrow_bps_per_year=0.0)
    actions = raw_actions(bars, len(bars) - 22)
    own = follow_targets(bars, actions, 20, costs=costs, account=account)
    found = assessed(bars, own)
    save(found, tmp_path, "test")
    write_weights(found, tmp_path / "weights.csv")
    bars.frame.write_csv(tmp_path / "bars.csv", datetime_format="%Y-%m-%dT%H:%M:%S%.3f%:z")
    script = Path(__file__).parent / "engines" / "vectorbt_weights.py"
    files = [tmp_path / name for name in ("weights.csv", "bars.csv")]
    subprocess.run(
        [engine_python("vectorbt"), script, *files, "7.5e-4", "3e-4", tmp_path / "found.npz"],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    theirs = np.load(tmp_path / "found.npz")
    assert theirs["n_orders"] > 100
    reported = np.cumprod(1.0 + pl.read_parquet(tmp_path / "test.parquet")["return"].to_numpy())
    assert_allclose(theirs["equity"], reported, rtol=1e-9)
    print(f"{market}: largest relative difference of equity {np.abs(theirs['equity'] / reported - 1).max():.1e}")
