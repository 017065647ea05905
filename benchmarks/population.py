"""What a population costs beside independent runs: 8 members on 2 processes against 2 plain trainings of as many steps.

    python -m benchmarks.population [--rounds 10] [--repeats 1] [--write]

Both sides run two processes of one thread each, in turn. Wall time is what a user waits for and means something on a
quiet machine only; processor time hardly depends on other users. Overhead is what the population does beside training:
the driver, building and loading agents, writing bundles, scoring. Starting a process costs both sides the same.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.results import markdown_table, write_section
from tailguard.population.config import PopulationConfig, population_config
from tailguard.population.driver import Population
from tailguard.population.history import history
from tailguard.population.journal import Journal
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


def run_population(config: PopulationConfig) -> tuple[float, float]:
    """Train it on local processes; returns processor seconds of its updates alone, and of whole segments and driver."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, began = Path(scratch) / "population", time.process_time()
        executor = LocalExecutor(PROCESSES, 600.0, folder / "logs")
        try:
            Population(config, folder, executor).run()
        finally:
            executor.close()
        driver = time.process_time() - began
        segments = history(Journal(folder / "population.jsonl").read())
    assert len(segments) == config.population.population_size * config.n_rounds, "segments were lost: see the log"
    training, whole = (
        sum(float(segment.told[name]) for segment in segments) for name in ("train_cpu_seconds", "cpu_seconds")
    )
    return training, whole + driver


def run_plain(steps: int) -> None:
    running = [subprocess.Popen([sys.executable, "-c", PLAIN, str(steps)]) for _ in range(PROCESSES)]
    assert [process.wait() for process in running] == [0] * PROCESSES


@dataclass(frozen=True)
class Cost:
    """Processor seconds of this process and its children, wall seconds, and the share that is no training."""

    cpu: float
    wall: float
    overhead: float = 0.0


def cost(work: Callable[[], tuple[float, float] | None]) -> Cost:
    before, began = processor_seconds(), time.perf_counter()
    training, whole = work() or (1.0, 1.0)
    wall, cpu = time.perf_counter() - began, processor_seconds() - before
    return Cost(cpu, wall, whole / training - 1.0)


def processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def measured(rounds: int, repeats: int) -> tuple[list[Cost], list[Cost]]:
    """Plain runs and populations in turn, so that a machine that changes its mind is unfair to neither."""
    plain, populations = [], []
    for _ in range(repeats):
        plain.append(cost(lambda: run_plain(MEMBERS * rounds * INTERVAL * ROLLOUT // PROCESSES)))
        populations.append(cost(lambda: run_population(population(rounds))))
        print(plain[-1], populations[-1], flush=True)
    return plain, populations


def told(plain: list[Cost], populations: list[Cost], steps: int) -> str:
    """The table and what follows from it; the best of the repeats counts, on both sides."""
    sides = {"2 plain runs": plain, f"population of {MEMBERS}": populations}
    wall, cpu = ([min(getattr(c, what) for c in side) for side in sides.values()] for what in ("wall", "cpu"))
    rows = [
        [name, f"{seconds:.0f}", f"{steps / seconds:,.0f}", f"{used:.0f}", f"{steps / used:,.0f}"]
        for name, seconds, used in zip(sides, wall, cpu, strict=True)
    ]
    table = markdown_table(["", "seconds", "steps per second", "CPU seconds", "steps per CPU second"], rows)
    overhead = min(c.overhead for c in populations)
    return (
        f"{steps:,} environment steps of the `regime` market on each side, on {PROCESSES} processes of one thread; "
        f"segments of {INTERVAL} updates; starting processes, scoring and writing bundles included. The population "
        f"makes **{wall[0] / wall[1]:.0%}** of the plain runs' steps per second and **{cpu[0] / cpu[1]:.0%}** of their "
        f"steps per CPU second. Driver, building agents, bundles and scoring add **{overhead:.1%}** to the processor "
        f"time of training.\n\n{table}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="of 10 updates; 10 are the preset's own steps")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write the table into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    plain, populations = measured(arguments.rounds, arguments.repeats)
    body = told(plain, populations, MEMBERS * arguments.rounds * INTERVAL * ROLLOUT)
    print(body)
    if arguments.write:
        command = f"python -m benchmarks.population --rounds {arguments.rounds} --repeats {arguments.repeats} --write"
        write_section("population", "Cost of a population", command, body)


if __name__ == "__main__":
    main()
