"""A real population that is small enough for tests: CartPole, four tiny agents, segments of a second."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tailguard.population.config import PopulationConfig, population_config
from tailguard.population.driver import Population, population_digest
from tailguard.population.tasks import Executor, InlineExecutor

HYPERPARAMS: list[dict[str, Any]] = [
    {"name": "learning_rate", "low": 1e-4, "high": 1e-2, "log": True},
    {"name": "ent_coef", "low": 0.0, "high": 0.02, "perturb_step": 0.005},
    {"name": "n_epochs", "low": 1, "high": 3, "integer": True},
]


def tiny_population(
    rounds: int = 3,
    seed: int = 0,
    gym_env: str = "CartPole-v1",
    ppo: Mapping[str, Any] | None = None,
    **population: Any,
) -> PopulationConfig:
    return population_config(
        {
            "gym_env": gym_env,
            "n_envs": 4,
            "steps": rounds * population.get("perturbation_interval", 2) * 4 * 32,
            "seed": seed,
            "policy_kwargs": {"lstm_hidden_size": 8, "net_arch": [8]},
            "ppo": {"n_steps": 32, "sequence_length": 8, "batch_size": 64, "critic": {"n_quantiles": 8}, **(ppo or {})},
            "population": {
                "population_size": 4,
                "perturbation_interval": 2,
                "score_steps": 50,
                "hyperparams": HYPERPARAMS,
                **population,
            },
        }
    )


def digest_of(config: PopulationConfig, folder: Path, executor: Executor | None = None) -> str:
    """Run a population to its end, or on from where it stopped, and take the digest of all that it is."""
    executor = executor or InlineExecutor()
    try:
        return population_digest(folder, Population(config, folder, executor).run())
    finally:
        executor.close()
