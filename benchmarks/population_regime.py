"""A population of 4 against 4 fixed configurations drawn from the same space, on the `regime` market, with equal steps.

    python -m benchmarks.population_regime [--seeds 5] [--steps 200000] [--write]

The fixed configurations are those the population begins with. Both are chosen from by their validation score and judged
by the fraction of the optimum on a draw of the market that neither training nor validation has seen.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.results import markdown_table, write_section
from tailguard import DistributionalPPO
from tailguard.env import score
from tailguard.population.config import PopulationConfig, population_config
from tailguard.population.driver import Population
from tailguard.population.segment import bundle_path
from tailguard.population.tasks import InlineExecutor
from tailguard.presets import preset

SPACE = [
    {"name": "learning_rate.start", "low": 1e-4, "high": 2e-2, "log": True},
    {"name": "ent_coef", "low": 1e-5, "high": 1e-1, "log": True},
    {"name": "gae_lambda", "low": 0.5, "high": 1.0},
    {"name": "clip_range", "low": 0.05, "high": 0.5, "log": True},
]
NOBODY_COPIES = 1e9  # a gap that no score exceeds


def configuration(seed: int, steps: int, copies: bool) -> PopulationConfig:
    return population_config(
        {
            "preset": "regime",
            "steps": steps,
            "seed": seed,
            "population": {
                "population_size": 4,
                "perturbation_interval": 3,
                "hyperparams": SPACE,
                "min_score_gap": 0.0 if copies else NOBODY_COPIES,
            },
        }
    )


def fractions(config: PopulationConfig) -> tuple[list[float], int]:
    """Fraction of the optimum of every member, out of sample, and which one validation chooses."""
    market = preset("regime").market
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "population"
        scheduler = Population(config, folder, InlineExecutor()).run()
        agents = [DistributionalPPO.load(bundle_path(folder, str(member.bundle))) for member in scheduler.members]
        reached = [score(market, agent, seed=900_000_000 + config.experiment.seed).fraction for agent in agents]
    assert scheduler.best is not None
    return reached, scheduler.best.index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200_000, help="of each member")
    parser.add_argument("--write", action="store_true", help="write the table into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    rows, chosen, medians, bests = [], [], [], []
    for seed in range(arguments.seeds):
        population, best = fractions(configuration(seed, arguments.steps, copies=True))
        fixed, _ = fractions(configuration(seed, arguments.steps, copies=False))
        chosen.append(population[best])
        medians.append(float(np.median(fixed)))
        bests.append(max(fixed))
        rows.append([str(seed), f"{chosen[-1]:.3f}", f"{medians[-1]:.3f}", f"{bests[-1]:.3f}"])
        print(rows[-1], "population", np.round(population, 3), "fixed", np.round(fixed, 3), flush=True)
    rows.append(["mean", *(f"{np.mean(column):.3f}" for column in (chosen, medians, bests))])
    table = markdown_table(["seed", "population's choice", "median of 4 fixed", "best of 4 fixed"], rows)
    body = f"Fraction of the optimum out of sample, {arguments.steps:,} steps per member.\n\n{table}"
    print(body)
    if arguments.write:
        command = f"python -m benchmarks.population_regime --seeds {arguments.seeds} --steps {arguments.steps} --write"
        write_section("population-regime", "A population on the regime market", command, body)


if __name__ == "__main__":
    main()
