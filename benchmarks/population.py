"""What a population costs beside independent runs: 8 members on 2 processes against 2 plain trainings of as many steps.

    python -m benchmarks.population [--rounds 2] [--write]

Both sides run two processes of one thread each. Processor time is what is compared: wall time on a shared machine says
more about its other users.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.results import markdown_table, write_section
from tailguard.population.config import PopulationConfig, population_config
from tailguard.population.driver import Population
from tailguard.population.local import LocalExecutor

MEMBERS, PROCESSES, INTERVAL, ROLLOUT = 8, 2, 10, 64 * 128
PLAIN = """
import sys
from tailguard.experiment import Experiment, experiment_config
config = experiment_config({"preset": "regime", "steps": int(sys.argv[1]), "ppo": {"update_threads": 1}})
Experiment(config).agent().learn(config.steps)
"""


def population(rounds: int) -> PopulationConfig:
    return population_config(
        {
            "preset": "regime",
            "steps": rounds * INTERVAL * ROLLOUT,
            "population": {
                "population_size": MEMBERS,
                "perturbation_interval": INTERVAL,
                "hyperparams": [{"name": "learning_rate.start", "low": 1e-3, "high": 5e-3, "log": True}],
            },
        }
    )


def run_population(config: PopulationConfig) -> None:
    folder = Path(tempfile.mkdtemp())
    executor = LocalExecutor(PROCESSES, 600.0, folder / "logs")
    try:
        Population(config, folder, executor).run()
    finally:
        executor.close()


def run_plain(steps: int) -> None:
    running = [subprocess.Popen([sys.executable, "-c", PLAIN, str(steps)]) for _ in range(PROCESSES)]
    assert [process.wait() for process in running] == [0] * PROCESSES


def cost(work: Callable[[], None]) -> tuple[float, float]:
    """Processor seconds of all child processes, and wall seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    work()
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - began
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write the table into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    steps = MEMBERS * arguments.rounds * INTERVAL * ROLLOUT
    plain_cpu, plain_wall = cost(lambda: run_plain(steps // PROCESSES))
    pbt_cpu, pbt_wall = cost(lambda: run_population(population(arguments.rounds)))
    rows = [
        ["2 plain runs", f"{plain_cpu:.0f}", f"{plain_wall:.0f}", f"{steps / plain_cpu:,.0f}"],
        [f"population of {MEMBERS}", f"{pbt_cpu:.0f}", f"{pbt_wall:.0f}", f"{steps / pbt_cpu:,.0f}"],
    ]
    table = markdown_table(["", "CPU seconds", "seconds", "steps per CPU second"], rows)
    body = (
        f"{steps:,} environment steps of the `regime` market on each side, on {PROCESSES} processes of one thread; "
        f"segments of {INTERVAL} updates; starting processes, scoring and writing bundles included. It makes "
        f"**{plain_cpu / pbt_cpu:.0%}** of the plain runs' steps per CPU second.\n\n{table}"
    )
    print(body)
    if arguments.write:
        command = f"python -m benchmarks.population --rounds {arguments.rounds} --write"
        write_section("population", "Cost of a population", command, body)


if __name__ == "__main__":
    main()
