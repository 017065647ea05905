"""Our population beside Ray Tune's PBT on the same load: 4 members, 20 short iterations, 2 processes.

    pip install 'ray[tune]'      (Tune imports pandas, pyarrow and requests; none is a dependency of ours)
    python -m benchmarks.ray_tune [--repeats 2] [--write]

Ours trains small agents on CartPole, whole: it imports torch, builds agents, writes and verifies bundles. Tune is
spared all that: its members only burn as much processor time per iteration as our training takes, and keep one number
as their checkpoint. So the difference is the machinery, and in Tune's favour. Every sensible setting of Tune is tried.
Of ours we also count the optimizer steps in which every param group had the rate that the scheduler wanted.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.population import PROCESSES, run_population
from benchmarks.results import markdown_table, write_section
from tailguard.population.config import PopulationConfig, population_config
from tailguard.population.driver import Population
from tailguard.population.tasks import InlineExecutor, Outcome

MEMBERS, ITERATIONS = 4, 20
N_ENVS, N_STEPS, UPDATES = 8, 64, 1
RATES = (1e-4, 1e-2)


def configuration() -> PopulationConfig:
    return population_config(
        {
            "gym_env": "CartPole-v1",
            "n_envs": N_ENVS,
            "steps": ITERATIONS * UPDATES * N_ENVS * N_STEPS,
            "policy_kwargs": {"lstm_hidden_size": 16, "net_arch": [16]},
            "ppo": {"n_steps": N_STEPS, "sequence_length": 16, "batch_size": 128, "update_threads": 1},
            "population": {
                "population_size": MEMBERS,
                "perturbation_interval": UPDATES,
                "score": "training",
                "hyperparams": [{"name": "learning_rate", "low": RATES[0], "high": RATES[1], "log": True}],
            },
        }
    )


@dataclass
class Rates:
    """Counts optimizer steps, and those whose rate is the wanted one in every param group."""

    wanted: float | None = None
    steps: int = 0
    right: int = 0

    def watch(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.steps += 1
        self.right += all(group["lr"] == self.wanted for group in optimizer.param_groups)


# ours


def rates_of_ours() -> Rates:
    """The same population in this process, every optimizer step looked at."""
    rates = Rates()

    class Watched(InlineExecutor):
        def wait(self, timeout_s: float) -> list[Outcome]:
            if self.tasks:
                rates.wanted = self.tasks[0].payload["segment"]["hyperparameters"]["learning_rate"]
            return super().wait(timeout_s)

    hook = register_optimizer_step_pre_hook(rates.watch)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            Population(configuration(), Path(scratch) / "population", Watched()).run()
    finally:
        hook.remove()
    return rates


# Ray Tune


def trainable(iteration_s: float) -> type:
    """One member as Tune wants it: nothing but the load."""
    from ray import tune

    class Member(tune.Trainable):
        def setup(self, config: dict[str, Any]) -> None:
            self.total = 0.0

        def step(self) -> dict[str, float]:
            until = time.process_time() + iteration_s
            while time.process_time() < until:
                pass
            self.total += self.config["learning_rate"]
            return {"score": self.total}

        def save_checkpoint(self, folder: str) -> None:
            (Path(folder) / "total").write_text(str(self.total))

        def load_checkpoint(self, folder: str) -> None:
            self.total = float((Path(folder) / "total").read_text())

        def reset_config(self, config: dict[str, Any]) -> bool:
            return True

    return Member


@dataclass(frozen=True)
class Setting:
    """One way to run Tune."""

    reuse_actors: bool
    synch: bool

    @property
    def name(self) -> str:
        return f"Ray Tune, {'synchronous' if self.synch else 'asynchronous'}, " + (
            "actors reused" if self.reuse_actors else "new actors"
        )


SETTINGS = [Setting(*choice) for choice in product((True, False), (True, False))]


def run_tune(setting: Setting, iteration_s: float) -> None:
    """Tune's PBT on members that take so many processor seconds per iteration."""
    import ray
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    ray.init(num_cpus=PROCESSES, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        metric="score",
        mode="max",
        perturbation_interval=1,
        hyperparam_mutations={"learning_rate": tune.loguniform(*RATES)},
        quantile_fraction=0.25,
        synch=setting.synch,
    )
    try:
        with tempfile.TemporaryDirectory() as scratch:
            results = tune.Tuner(
                tune.with_resources(trainable(iteration_s), {"cpu": 1}),
                param_space={"learning_rate": tune.loguniform(*RATES)},
                tune_config=tune.TuneConfig(
                    num_samples=MEMBERS, scheduler=scheduler, reuse_actors=setting.reuse_actors
                ),
                run_config=tune.RunConfig(
                    storage_path=scratch, stop={"training_iteration": ITERATIONS}, verbose=0, name="tune"
                ),
            ).fit()
            assert [result.metrics["training_iteration"] for result in results] == [ITERATIONS] * MEMBERS
    finally:
        ray.shutdown()


# measuring


@dataclass
class Processor:
    """Processor seconds of this process and all its descendants, also of those that nobody waits for."""

    seen: dict[int, float] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)

    def look(self) -> None:
        parents, used = {}, {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                fields = (place / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parents[int(place.name)] = int(fields[1])
            used[int(place.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        for pid, seconds in used.items():
            above = pid
            while above not in (0, 1, os.getpid()):
                above = parents.get(above, 0)
            if above == os.getpid():
                self.seen[pid] = seconds

    def follow(self) -> None:
        while not self.over.wait(0.1):
            self.look()


Measured = tuple[float, float, Any]


def measured(work: Callable[[], object]) -> Measured:
    """Wall seconds, processor seconds, and what the work returned."""
    processor = Processor()
    processor.look()
    before = dict(processor.seen)
    thread = threading.Thread(target=processor.follow, daemon=True)
    began = time.perf_counter()
    thread.start()
    result = work()
    wall = time.perf_counter() - began
    processor.over.set()
    thread.join()
    return wall, sum(processor.seen.values()) - sum(before.values()), result


def best(times: list[Measured]) -> list[str]:
    return [f"{min(wall for wall, _, _ in times):.1f}", f"{min(cpu for _, cpu, _ in times):.1f}"]


def told(ours: list[Measured], theirs: Mapping[Setting, list[Measured]], rates: Rates, repeats: int) -> str:
    """The table and what it is about."""
    training = min(result[0] for _, _, result in ours)
    rows = [
        ["ideal: training alone, on 2 processes", f"{training / PROCESSES:.1f}", f"{training:.1f}"],
        ["ours", *best(ours)],
        *([setting.name, *best(times)] for setting, times in theirs.items()),
    ]
    return (
        f"{MEMBERS} members, {ITERATIONS} iterations of {training / MEMBERS / ITERATIONS:.2f} CPU seconds, {PROCESSES} "
        f"processes, judged after every iteration; the best of {repeats}, interleaved, with starting and ending all "
        "processes. Ours trains agents, with torch and bundles; Tune's members only burn the same processor time. "
        f"In ours, **{rates.right / rates.steps:.1%}** of {rates.steps:,} optimizer steps had the wanted rate in every "
        f"param group.\n\n{markdown_table(['', 'seconds', 'CPU seconds'], rows)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--settings", default="0,1,2,3", help="which settings of Tune, by number")
    parser.add_argument("--write", action="store_true", help="write the table into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    settings = [SETTINGS[int(number)] for number in arguments.settings.split(",")]
    ours: list[Measured] = []
    theirs: dict[Setting, list[Measured]] = {setting: [] for setting in settings}
    for _ in range(arguments.repeats):
        ours.append(measured(lambda: run_population(configuration())))
        print("ours", ours[-1], flush=True)
        training = min(result[0] for _, _, result in ours)
        for setting, times in theirs.items():
            times.append(measured(partial(run_tune, setting, training / (MEMBERS * ITERATIONS))))
            print(setting.name, times[-1], flush=True)
    body = told(ours, theirs, rates_of_ours(), arguments.repeats)
    print(body)
    if arguments.write:
        command = " ".join(["python -m benchmarks.ray_tune", *sys.argv[1:]])
        write_section("ray-tune", "A population beside Ray Tune's", command, body)


if __name__ == "__main__":
    main()
