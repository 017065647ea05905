"""Our population beside Ray Tune's PBT on the same load: 4 members, 20 short iterations, 2 processes.

    pip install 'ray[tune]'      (pandas, pyarrow and requests, which Tune imports; none is a dependency of ours)
    python -m benchmarks.ray_tune [--repeats 2] [--write]

Both train the same small agents on CartPole with the same code, so what differs is the machinery: how members are
started, paused, copied and judged. Of Tune, every sensible setting is tried and the best counts. Both are also asked in
how many optimizer steps the rate was the one their scheduler wanted; Tune's trainable copies agents with our exploit.
"""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.population import PROCESSES, run_population
from benchmarks.results import markdown_table, write_section
from tailguard.experiment import Experiment
from tailguard.population.config import PopulationConfig, population_config
from tailguard.population.driver import Population
from tailguard.population.exploit import exploit
from tailguard.population.scheduler import RunSegment
from tailguard.population.segment import train
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

    @property
    def share(self) -> str:
        return f"{self.right / max(self.steps, 1):.1%} of {self.steps:,}"


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


def trainable() -> type:
    """One member as Tune wants it; Ray is imported only where it is used."""
    from ray import tune

    class Member(tune.Trainable):
        def setup(self, config: dict[str, Any]) -> None:
            warnings.simplefilter("ignore")
            self.rates = Rates()
            self.hook = register_optimizer_step_pre_hook(self.rates.watch)
            self.build(config)

        def build(self, config: Mapping[str, Any]) -> None:
            whole = configuration()
            ppo = whole.experiment.ppo.replace(learning_rate=config["learning_rate"])
            self.agent = Experiment(whole.experiment.replace(ppo=ppo, seed=1)).agent()
            self.rates.wanted = config["learning_rate"]
            self.segment = RunSegment(0, 0, 0, None, None, {"learning_rate": config["learning_rate"]}, 1, UPDATES)

        def step(self) -> dict[str, Any]:
            pace = train(self.agent, self.segment, configuration(), lambda: None)
            return {"score": pace.mean_return, "rate_steps": self.rates.steps, "rate_right": self.rates.right}

        def save_checkpoint(self, folder: str) -> None:
            self.agent.checkpoint(Path(folder) / "agent")

        def load_checkpoint(self, folder: str) -> None:
            exploit(self.agent, Path(folder) / "agent", self.segment.hyperparameters)

        def reset_config(self, config: dict[str, Any]) -> bool:
            self.build(config)
            return True

        def cleanup(self) -> None:
            self.hook.remove()

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


def run_tune(setting: Setting, rates: Rates) -> None:
    """Tune's PBT; counts into `rates` what its members counted."""
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
                tune.with_resources(trainable(), {"cpu": 1}),
                param_space={"learning_rate": tune.loguniform(*RATES)},
                tune_config=tune.TuneConfig(
                    num_samples=MEMBERS, scheduler=scheduler, reuse_actors=setting.reuse_actors
                ),
                run_config=tune.RunConfig(
                    storage_path=scratch, stop={"training_iteration": ITERATIONS}, verbose=0, name="tune"
                ),
            ).fit()
            assert not results.errors
            for result in results:
                rates.steps += result.metrics["rate_steps"]
                rates.right += result.metrics["rate_right"]
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


def measured(work: Callable[[], object]) -> tuple[float, float, Any]:
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


def best(times: list[tuple[float, float, Any]]) -> list[str]:
    return [f"{min(wall for wall, _, _ in times):.1f}", f"{min(cpu for _, cpu, _ in times):.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--settings", default="0,1,2,3", help="which settings of Tune, by number")
    parser.add_argument("--write", action="store_true", help="write the table into benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    settings = [SETTINGS[int(number)] for number in arguments.settings.split(",")]
    ours: list[tuple[float, float, Any]] = []
    theirs: dict[Setting, list[tuple[float, float, Any]]] = {setting: [] for setting in settings}
    rates = {setting: Rates() for setting in settings}
    for _ in range(arguments.repeats):
        ours.append(measured(lambda: run_population(configuration())))
        print("ours", ours[-1], flush=True)
        for setting in settings:
            theirs[setting].append(measured(lambda setting=setting: run_tune(setting, rates[setting])))
            print(setting.name, theirs[setting][-1], flush=True)
    training = min(result[0] for _, _, result in ours)
    rows = [["ideal: training alone, on 2 processes", f"{training / PROCESSES:.1f}", f"{training:.1f}", ""]]
    rows.append(["ours", *best(ours), rates_of_ours().share])
    rows += [[setting.name, *best(times), rates[setting].share] for setting, times in theirs.items()]
    table = markdown_table(["", "seconds", "CPU seconds", "optimizer steps with the wanted rate"], rows)
    body = (
        f"{MEMBERS} members, {ITERATIONS} iterations of one update each, {PROCESSES} processes, judged after "
        f"every iteration; the best of {arguments.repeats}, interleaved, with starting and ending all "
        f"processes.\n\n{table}"
    )
    print(body)
    if arguments.write:
        command = f"python -m benchmarks.ray_tune --repeats {arguments.repeats} --write"
        write_section("ray-tune", "A population beside Ray Tune's", command, body)


if __name__ == "__main__":
    main()
