"""Steps per second of the trading environment, beside gym-trading-env and gym-anytrading on the same bars.

The two peers run in a virtual environment of their own, one environment at a time: they have no batched form, and a
vector wrapper only adds to the cost of a step. CPU time leaves out other work on the machine, wall time
does not; both are shown.

    python -m benchmarks.env_speed
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.results import write_section
from tailguard.env import EnvConfig, TradingVecEnv
from tailguard.market.oracles import oracle_market

CACHE = Path(os.environ.get("TAILGUARD_TEST_CACHE", Path.home() / ".cache" / "tailguard-tests")) / "env-peers"
PACKAGES = ["gym-trading-env==0.3.5", "gym-anytrading==2.0.0"]
N_BARS, N_FEATURES, ROUNDS = 20_000, 4, 7

PEERS = """
import sys, time, warnings
import numpy as np, pandas as pd
import gymnasium as gym, gym_trading_env, gym_anytrading
warnings.simplefilter("ignore")  # one of them turns warnings into errors when imported
close = np.load(sys.argv[1])
frame = pd.DataFrame({"close": close}, index=pd.date_range("2000", periods=len(close), freq="h"))
frame["open"] = frame["close"].shift(1).fillna(frame["close"])
frame["high"], frame["low"] = frame[["open", "close"]].max(axis=1), frame[["open", "close"]].min(axis=1)
frame["volume"] = 1.0
change = frame["close"].pct_change().fillna(0.0)
for i in range(4):
    frame[f"feature_{i}"] = change.shift(i).fillna(0.0)
trading = gym.make("TradingEnv", df=frame, positions=[-1, 0, 1], trading_fees=5e-4, verbose=0, max_episode_duration=250,
                   disable_env_checker=True)
upper = frame.rename(columns=str.capitalize)
anytrading = gym.make("stocks-v0", df=upper, window_size=4, frame_bound=(4, len(frame)), disable_env_checker=True)
for name, env in (("gym-trading-env", trading), ("gym-anytrading", anytrading)):
    cpu = wall = 0.0
    for _ in range(int(sys.argv[2])):
        env.reset(seed=0)
        begin, began, n = time.process_time(), time.perf_counter(), 4000
        for i in range(n):
            _, _, terminated, truncated, _ = env.step(i % 2)
            if terminated or truncated:
                env.reset()
        cpu = max(cpu, n / (time.process_time() - begin))
        wall = max(wall, n / (time.perf_counter() - began))
    print(name, cpu, wall)
"""


def ours(n_envs: int, n_assets: int = 1) -> tuple[float, float]:
    """Steps per second of CPU time and of wall time, each the best of the rounds; actions are drawn beforehand."""
    market = oracle_market("pairs" if n_assets == 2 else "noise")
    bars = market.bars(N_BARS, seed=0)
    rng = np.random.default_rng(0)
    features = rng.normal(size=(N_BARS, n_assets, N_FEATURES)).astype(np.float32)
    env = TradingVecEnv(bars, features, n_envs=n_envs, config=EnvConfig(episode_length=250))
    actions = rng.uniform(-1, 1, (64, n_envs, n_assets)).astype(np.float32)
    env.reset()
    n_steps = max(2000, 200_000 // n_envs)
    cpu = wall = 0.0
    for _ in range(ROUNDS):
        begin, began = time.process_time(), time.perf_counter()
        for i in range(n_steps):
            env.step(actions[i % 64])
        cpu = max(cpu, n_steps * n_envs / (time.process_time() - begin))
        wall = max(wall, n_steps * n_envs / (time.perf_counter() - began))
    return cpu, wall


def peers_python() -> Path:
    """Python of the peers' own virtual environment, built on first use."""
    python = CACHE / "bin" / "python"
    if not (CACHE / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", CACHE], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        (CACHE / ".ready").touch()
    return python


def peers() -> dict[str, tuple[float, float]]:
    """Steps per second of the peers, from a process of their own."""
    python = peers_python()
    with tempfile.TemporaryDirectory() as folder:
        close = Path(folder) / "close.npy"
        np.save(close, oracle_market("noise").bars(N_BARS, seed=0).close[:, 0])
        output = subprocess.run(
            [python, "-c", PEERS, close, str(ROUNDS)], check=True, capture_output=True, text=True
        ).stdout
    rows = [line.split() for line in output.splitlines() if line]
    return {name: (float(cpu), float(wall)) for name, cpu, wall in rows}


def main() -> None:
    rows = [(f"TradingVecEnv, {n} envs, 1 asset", ours(n)) for n in (1, 16, 64, 256)]
    rows.append(("TradingVecEnv, 64 envs, 2 assets", ours(64, 2)))
    rows += [(f"{name}, 1 env", speed) for name, speed in peers().items()]
    lines = ["| environment | env-steps per CPU second | env-steps per second |", "| --- | ---: | ---: |"]
    lines += [f"| {name} | {cpu:,.0f} | {wall:,.0f} |" for name, (cpu, wall) in rows]
    body = (
        f"One thread, no policy, {N_FEATURES} features, all costs on, best of {ROUNDS} rounds for every row; load "
        f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores. CPU time leaves out other work on the machine, wall time "
        "does not. The peers have no batched form; one of their environments is one row.\n\n" + "\n".join(lines)
    )
    print(body)
    write_section("env-speed", "Environment speed", "python -m benchmarks.env_speed", body)


if __name__ == "__main__":
    main()
