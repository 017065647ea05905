"""One measurement in a process of its own: `python -m benchmarks.scaling.measure '<request>'` prints what it found."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.scaling.points import Point
from tailguard import DistributionalPPO
from tailguard.env import EnvConfig, TradingVecEnv
from tailguard.market import Bars

MEGA = 2**20
BATCH, EPOCHS, FEATURES, EPISODE = 1024, 2, 4, 250


def random_env(n_envs: int, n_assets: int, n_bars: int) -> TradingVecEnv:
    """Random walks with a few random features each: prices do not matter here."""
    rng = np.random.default_rng(0)
    close = 100.0 * np.exp(1e-3 * rng.standard_normal((n_bars, n_assets)))
    open_ = np.vstack([close[:1], close[:-1]])
    bars = Bars.from_arrays(
        np.datetime64("2000-01-01", "ms") + np.arange(n_bars) * np.timedelta64(60_000, "ms"),
        [f"A{i}" for i in range(n_assets)],
        open_,
        np.maximum(open_, close),
        np.minimum(open_, close),
        close,
        np.full(close.shape, 1e6),
    )
    features = rng.standard_normal((n_bars, n_assets, FEATURES), np.float32)
    return TradingVecEnv(bars, features, n_envs=n_envs, config=EnvConfig(episode_length=EPISODE))


def make_agent(point: Point, env: TradingVecEnv) -> DistributionalPPO:
    return DistributionalPPO(
        "MlpLstmPolicy",
        env,
        n_steps=point.n_steps,
        batch_size=min(BATCH, point.n_envs * point.n_steps),
        n_epochs=EPOCHS,
        critic={"n_quantiles": point.quantiles, "twin": True},
        policy_kwargs={"lstm_hidden_size": point.hidden},
        update_threads=1,
        seed=0,
    )


def resident() -> float:
    """Megabytes the process holds now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MEGA


def largest() -> float:
    """Megabytes the process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cost(point: Point, seconds: float) -> dict[str, float]:
    """Time of a rollout and its update, and memory beyond a process that has learned the smallest thing."""
    make_agent(Point(n_envs=1, n_steps=2), random_env(1, 1, 1_000)).learn(2)  # imports and compiled loops
    before = resident()
    agent = make_agent(point, random_env(point.n_envs, point.assets, point.bars))
    rollout = point.n_envs * point.n_steps

    def spent(cycles: int) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        agent.learn(cycles * rollout)
        return (time.perf_counter() - wall) / cycles, (time.process_time() - cpu) / cycles

    wall, cpu = spent(1)
    cycles = round(seconds / wall)
    if cycles > 0:  # the first one touched fresh memory
        wall, cpu = spent(cycles)
    memory = max(largest() - before, 0.0)
    return {"wall": wall, "cpu": cpu, "memory": memory, "steps_per_second": rollout / wall, "per_cpu": rollout / cpu}


def leak(updates: int) -> dict[str, float]:
    """Megabytes held after a tenth of the updates and after all of them."""
    agent = make_agent(Point(n_envs=8, n_steps=32), random_env(8, 1, 20_000))
    rollout, held = 8 * 32, []
    for share in (updates // 10, updates - updates // 10):
        agent.learn(share * rollout)
        held.append(resident())
    return {"early": held[0], "late": held[1], "growth": held[1] - held[0]}


JOBS: dict[str, Callable[..., dict[str, float]]] = {
    "cost": lambda request: cost(Point(**request["point"]), request["seconds"]),
    "leak": lambda request: leak(request["updates"]),
}


def main() -> None:
    request: dict[str, Any] = json.loads(sys.argv[1])
    print(json.dumps(JOBS[request["job"]](request)))


if __name__ == "__main__":
    main()
