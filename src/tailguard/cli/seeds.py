"""`tailguard train --seeds`: the same experiment with several seeds, in parallel."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from tailguard.cli.evaluate import Say, conclude
from tailguard.cli.workers import executor_of, working
from tailguard.errors import ConfigError
from tailguard.experiment import Experiment, ExperimentConfig, experiment_config, load_experiment, on_shared_paths
from tailguard.population.runs import require_same_settings, seed_tasks
from tailguard.population.tasks import HANG_TIMEOUT_S, MAX_FAILURES, Executor, Outcome, Task, run_all
from tailguard.run import RunFolder, run_path
from tailguard.yaml_files import parse_yaml

MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Study:
    """Which seeds, where they train, and what is said and done about them."""

    seeds: str
    workers: int | None = None
    ray_address: str | None = None
    kind: str = "live"
    dry_run: bool = False
    report: bool | None = None
    fail_on_alert: bool = False


def start_seeds(
    config_file: Path | None, given: Mapping[str, Any], overrides: Sequence[str], run: str | None, study: Study
) -> None:
    """Train the same experiment with several seeds, or go on with what an earlier call left unfinished."""
    seeds = parsed_seeds(study.seeds)
    config = on_shared_paths(load_experiment(config_file, given, overrides))
    place = run_path(run or Experiment(config).task.name)
    tasks = seed_tasks(config, seeds, place, sys.argv)
    if study.dry_run:
        typer.echo("---\n".join(task.payload["config"] for task in tasks), nl=False)
        return
    for task in tasks:
        require_same_settings(RunFolder(task.payload["folder"]), config_of(task))
    n_given_up = train_all(tasks, place, study)
    alerted = conclude_all(tasks, study)
    if n_given_up or (study.fail_on_alert and alerted):
        raise typer.Exit(1)


def train_all(tasks: Sequence[Task], place: Path, study: Study) -> int:
    """Work on every seed; returns how many were given up."""
    scratch = place.with_name(f"{place.name}-seeds")

    def workplace() -> Executor:
        return executor_of(scratch, len(tasks), HANG_TIMEOUT_S, study.workers, study.ray_address)

    def tell(outcome: Outcome) -> None:
        if study.kind == "json":
            typer.echo(json.dumps({"seed": int(outcome.key), **(outcome.result or {"failed": outcome.reason})}))
        elif outcome.result is None:
            typer.echo(f"seed {outcome.key} failed: {outcome.reason}", err=True)
        elif study.kind == "live":
            typer.echo(f"seed {outcome.key}: {outcome.result['step']:,} steps in {outcome.result['folder']}")

    with working(workplace, "the same command goes on from the last checkpoints.") as executor:
        return run_all(executor, tasks, MAX_FAILURES, tell)


def conclude_all(tasks: Sequence[Task], study: Study) -> bool:
    """Examine what is finished as `tailguard train` does; returns whether any training raised an alert."""
    say: Say = typer.echo if study.kind == "live" else lambda text: None
    alerted = False
    for task in tasks:
        config, folder = config_of(task), RunFolder(run_path(Path(task.payload["folder"])))
        if not (folder.steps() and folder.steps()[-1] >= config.steps):
            continue
        conclude(Experiment(config), folder, say, study.report)
        if folder.alerts_file.exists() and folder.alerts_file.read_text():
            alerted = True
            say(f"seed {task.key}: alerts were raised, see {folder.alerts_file}")
    return alerted


def config_of(task: Task) -> ExperimentConfig:
    return experiment_config(parse_yaml(task.payload["config"], "config.yaml"))


def parsed_seeds(text: str) -> list[int]:
    """'0,1,5' or '0-4' as numbers."""
    try:
        parts = [part.split("-") for part in text.split(",")]
        ranges = [range(int(part[0]), int(part[-1]) + 1) for part in parts]
    except ValueError:
        ranges = []
    n_seeds = sum(one.stop - one.start for one in ranges)
    if n_seeds > MOST_SEEDS:
        raise ConfigError(f"--seeds {text[:60]} names {n_seeds:,} seeds; at most {MOST_SEEDS:,} are trained at once.")
    seeds = [seed for one in ranges for seed in one]
    if not seeds or len(set(seeds)) != len(seeds):
        raise ConfigError(f"--seeds {text!r} names no seeds, or one twice. Use 0,1,2 or 0-4.")
    return seeds
