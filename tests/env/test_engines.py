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
from tailguard.market import Bars

pytestmark = pytest.mark.slow

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
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
    files = [DATA / f"{name}.parquet" for name in names]
    if not all(file.exists() for file in files):
        pytest.skip(f"real bars are not in {DATA}")
    columns = ["ts", "symbol", "open", "high", "low", "close", "volume"]
    frame = pl.concat([pl.read_parquet(file).select(columns) for file in files]).sort("ts", maintain_order=True)
    last = frame["ts"].unique().sort()[n_bars - 1]
    return Bars(frame.filter(pl.col("ts") <= last))


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
