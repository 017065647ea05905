"""What an agent has learned after few steps, beside RecurrentPPO: equal steps, equal environments, all seeds shown.

Tasks: CartPole without velocities, where two steps matter, and a cue that is shown once and asked for after 24 steps of
noise. Agents: ours and RecurrentPPO, each with its own defaults and, on CartPole, with the settings of SB3's zoo.
"""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecEnv

from benchmarks.results import markdown_table, parser_of, publish
from tailguard import DistributionalPPO

MODULE = "benchmarks.sample_efficiency"
DELAY, N_CUES, N_ENVS, TEST_SEED = 24, 4, 8, 1_000_000


class HideVelocities(gym.ObservationWrapper[Any, Any, Any]):
    """CartPole's position and angle alone."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        space = env.observation_space
        assert isinstance(space, spaces.Box)
        self.observation_space = spaces.Box(space.low[[0, 2]], space.high[[0, 2]], dtype=np.float32)

    def observation(self, observation: NDArray[Any]) -> NDArray[Any]:
        return observation[[0, 2]]


class NoisyRecall(gym.Env[Any, Any]):
    """One of four cues is shown at the first step and asked for after `DELAY` steps. Two features are noise."""

    observation_space = spaces.Box(-8.0, 8.0, (N_CUES + 4,), np.float32)
    action_space = spaces.Discrete(N_CUES)

    def look(self) -> NDArray[np.float32]:
        shown = np.zeros(N_CUES + 4, np.float32)
        if self.clock == 0:
            shown[[self.cue, N_CUES]] = 1.0
        else:
            shown[N_CUES + 1] = self.clock == DELAY
            shown[-2:] = self.np_random.normal(size=2)
        return shown

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[NDArray[np.float32], dict[str, Any]]:
        super().reset(seed=seed)
        self.cue, self.clock = int(self.np_random.integers(N_CUES)), 0
        return self.look(), {}

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        asked = self.clock == DELAY
        self.clock += 1
        return self.look(), float(asked and int(action) == self.cue), asked, False, {}


def make_env(task: str, n_envs: int, seed: int) -> VecEnv:
    """n environments of a task."""
    if task == "recall":
        return make_vec_env(NoisyRecall, n_envs, seed=seed)
    return make_vec_env("CartPole-v1", n_envs, seed=seed, wrapper_class=HideVelocities)


def zoo_settings() -> dict[str, Any]:
    """Those of CartPoleNoVel-v1 in rl-baselines3-zoo, `ppo_lstm.yml`; both schedules fall to zero over the training."""
    settings = {"n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20, "ent_coef": 0.0}
    return {**settings, "learning_rate": lambda left: 1e-3 * left, "clip_range": lambda left: 0.2 * left}


def trained(job: tuple[str, str, str, int, int]) -> tuple[float, float]:
    """Mean return of the deterministic agent in fresh environments, and the CPU seconds of its training."""
    task, learner, settings, steps, seed = job
    torch.set_num_threads(1)
    options = zoo_settings() if settings == "zoo" else {}
    env = make_env(task, N_ENVS, seed)
    agent: Any
    if learner == "RecurrentPPO":
        from sb3_contrib import RecurrentPPO

        agent = RecurrentPPO("MlpLstmPolicy", env, seed=seed, device="cpu", **options)
    else:
        agent = DistributionalPPO("MlpLstmPolicy", env, seed=seed, update_threads=1, **options)
    began = time.process_time()
    agent.learn(steps)
    seconds = time.process_time() - began
    episodes = 200 if task == "recall" else 20
    returns, _ = evaluate_policy(agent, make_env(task, 10, TEST_SEED + seed), episodes, return_episode_rewards=True)
    return float(np.mean(returns)), seconds


def interquartile_mean(results: NDArray[Any]) -> NDArray[Any]:
    """Mean over the last axis without its lowest and highest quarter."""
    ordered = np.sort(results, -1)
    cut = ordered.shape[-1] // 4
    return np.asarray(ordered[..., cut : ordered.shape[-1] - cut].mean(-1))


def row_of(name: str, results: list[tuple[float, float]]) -> list[str]:
    """A line of the table: interquartile mean with its bootstrap interval, all seeds, CPU time."""
    returns = np.array([each for each, _ in results])
    drawn = np.random.default_rng(0).choice(returns, (10_000, len(returns)))
    low, high = np.quantile(interquartile_mean(drawn), [0.025, 0.975])
    digits = 0 if returns.max() > 5.0 else 2
    every = " ".join(f"{each:.{digits}f}" for each in returns)
    figures = f"{interquartile_mean(returns):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
    return [name, figures, every, f"{np.mean([seconds for _, seconds in results]):.1f}"]


def main() -> None:
    parser = parser_of(MODULE, __doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", choices=["ours", "RecurrentPPO"], help="leave the other learner out")
    options = parser.parse_args()
    learners = [options.only] if options.only else ["ours", "RecurrentPPO"]
    cases = [
        (task, learner, settings)
        for task, settings in (("cartpole", "own"), ("cartpole", "zoo"), ("recall", "own"))
        for learner in learners
    ]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    jobs = [(*case, options.steps, seed) for seed in seeds for case in cases]
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        results = dict(zip(jobs, pool.map(trained, jobs), strict=True))
    rows = []
    for case in cases:
        task, learner, settings = case
        results_of = [results[*case, options.steps, seed] for seed in seeds]
        rows.append(row_of(f"{task}, {learner}, {settings} settings", results_of))
    words = (
        f"{options.seeds} seeds, {options.steps:,} steps in {N_ENVS} environments; interquartile mean of returns of "
        "deterministic agents (95 % bootstrap interval over seeds). CartPole without velocities earns at most 500; "
        f"recall is one of {N_CUES} cues asked for after {DELAY} steps of noise, chance {1 / N_CUES}."
    )
    table = markdown_table(["task, agent", "return", "all seeds", "CPU s per seed"], rows)
    publish("sample-efficiency", "Sample efficiency", MODULE, f"{words}\n\n{table}", options.dry)


if __name__ == "__main__":
    main()
