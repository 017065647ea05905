"""Learning claims are made over seeds: run them all, then look at the interquartile mean, never at the best."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv

from tailguard import DistributionalPPO
from tailguard.schedules import Schedule

Result = TypeVar("Result")
SEEDS = range(5)
FALLING = Schedule(start=2e-3, end=0.0)
"""A learning rate for what must be known exactly after one `learn`."""


def over_seeds(run: Callable[..., Result], *arguments: Any, seeds: Sequence[int] = SEEDS) -> list[Result]:
    """run(seed, *arguments) for every seed, on the cores that are left to this pytest worker."""
    workers = max((os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), 1)
    if workers == 1:
        return [run(seed, *arguments) for seed in seeds]
    with ProcessPoolExecutor(
        workers, get_context("spawn"), initializer=warnings.simplefilter, initargs=("error",)
    ) as pool:
        return list(pool.map(run, seeds, *([argument] * len(seeds) for argument in arguments)))


def interquartile_mean(results: Sequence[Any]) -> NDArray[Any]:
    """Mean over the seeds (first axis) without the lowest and the highest quarter, element by element."""
    ordered = np.sort(np.asarray(results, dtype=np.float64), axis=0)
    cut = len(ordered) // 4
    return np.asarray(ordered[cut : len(ordered) - cut].mean(axis=0))


def mean_return(model: DistributionalPPO, env: VecEnv, episodes: int) -> float:
    """Mean episode return of the deterministic policy."""
    returns, _ = evaluate_policy(model, env, n_eval_episodes=episodes, return_episode_rewards=True)
    return float(np.mean(returns))


def heard_by(agent: DistributionalPPO) -> list[str]:
    """Alerts that the agent will raise, as they come: what it is, its figure, and when."""
    heard: list[str] = []
    agent.alerts.listeners.append(
        lambda alert, value: heard.append(f"{alert.name}, {value:.3g} at update {agent.alerts.updates}")
    )
    return heard
