"""The crash market out of sample: mean and CVaR of an episode's return, with and without a limit, beside the optimum.

python -m benchmarks.crash [--seeds 5] [--workers 2]      about two minutes of one core per seed with a limit
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

import numpy as np

from benchmarks.oracles import alerts_of, interquartile_mean, over_seeds
from benchmarks.results import markdown_table, parser_of, publish
from tailguard.env import replay
from tailguard.env.oracle import stretches_env
from tailguard.losses.risk import empirical_cvar
from tailguard.market.oracles import CrashMarket
from tailguard.presets import crash

MODULE = "benchmarks.crash"
ALPHA, LIMIT, EPISODES = 0.05, -0.04, 8_000


@dataclass(frozen=True)
class Goal:
    """What the best policy earns, and its CVaR."""

    mean: float
    cvar: float


def goal(limit: float | None) -> Goal:
    market = CrashMarket()
    if limit is None:
        return Goal(market.episode_reward(market.episode_length), market.period_cvar(1.0, ALPHA))
    best = market.cvar_limited(ALPHA, limit)
    return Goal(best.episode_reward, best.cvar)


def out_of_sample(limit: float | None, seed: int) -> dict[str, float]:
    """Mean and CVaR of the deterministic policy on a fresh draw, and how many alerts its training raised."""
    task = crash(alpha=ALPHA, cvar_limit=limit)
    agent = task.agent(seed)
    heard = alerts_of(agent)
    agent.learn(task.total_timesteps)
    length = CrashMarket().episode_length
    env = stretches_env(task.market, 1_000_000 + seed, EPISODES, length)
    returns = replay(env, agent, length).reward.sum(axis=0)
    return {"mean": float(returns.mean()), "cvar": empirical_cvar(returns, ALPHA), "alerts": len(heard)}


def rows_of(label: str, limit: float | None, found: dict[str, np.ndarray]) -> list[list[str]]:
    best = goal(limit)
    rows = [
        [label, str(seed), f"{mean:.2%}", f"{mean / best.mean:.1%}", f"{cvar:.2%}", f"{alerts:.0f}"]
        for seed, (mean, cvar, alerts) in enumerate(zip(*found.values(), strict=True))
    ]
    mean, cvar = interquartile_mean(found["mean"]), interquartile_mean(found["cvar"])
    summary = ["interquartile mean", f"{mean:.2%}", f"{mean / best.mean:.1%}", f"{cvar:.2%}", ""]
    return [*rows, [label, *summary], [label, "optimum", f"{best.mean:.2%}", "100 %", f"{best.cvar:.2%}", ""]]


def main() -> None:
    parser = parser_of(MODULE, __doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes at once")
    options = parser.parse_args()
    rows = []
    for label, limit in (("no limit", None), (f"limit {LIMIT:.0%}", LIMIT)):
        found = over_seeds(partial(out_of_sample, limit), options.seeds, options.workers)
        rows += rows_of(label, limit, found)
        print(*rows[-options.seeds - 2 :], sep="\n", flush=True)
    table = markdown_table(["", "seed", "mean", "of the optimum", f"CVaR {ALPHA:.0%}", "alerts"], rows)
    words = f"Return of an episode of 250 bars, deterministic policy, {EPISODES:,} episodes of a fresh draw per seed."
    publish("crash", "The crash market and its limit", MODULE, f"{words}\n\n{table}", options.dry)


if __name__ == "__main__":
    main()
