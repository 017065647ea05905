"""`tailguard train --seeds`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from tailguard.cli.population import executor_of, stopped_by_signals
from tailguard.errors import ConfigError
from tailguard.experiment import Experiment, load_experiment
from tailguard.population.runs import seed_tasks
from tailguard.population.tasks import Outcome, run_all
from tailguard.run import StoppedNow, run_path

MAX_FAILURES, HANG_TIMEOUT_S = 3, 600.0


def start_seeds(
    config_file: Path | None,
    given: Mapping[str, Any],
    overrides: Sequence[str],
    run: str | None,
    seeds: str,
    workers: int | None,
    ray_address: str | None,
) -> None:
    """Train the same experiment with several seeds, or go on with what an earlier call left unfinished."""
    config = load_experiment(config_file, given, overrides)
    place = run_path(run or Experiment(config).task.name)
    tasks = seed_tasks(config, parsed_seeds(seeds), place, sys.argv)
    executor = executor_of(place.with_name(f"{place.name}-seeds"), len(tasks), HANG_TIMEOUT_S, workers, ray_address)

    def tell(outcome: Outcome) -> None:
        done = outcome.result
        said = f"failed: {outcome.reason}" if done is None else f"{done['step']:,} steps in {done['folder']}"
        typer.echo(f"seed {outcome.key}: {said}")

    try:
        with stopped_by_signals():
            n_given_up = run_all(executor, tasks, MAX_FAILURES, tell)
    except StoppedNow as stop:
        typer.echo(f"{stop}; the same command goes on from the last checkpoints.", err=True)
        raise typer.Exit(stop.exit_code) from None
    finally:
        executor.close()
    if n_given_up:
        raise typer.Exit(1)


def parsed_seeds(text: str) -> list[int]:
    """'0,1,5' or '0-4' as numbers."""
    try:
        parts = [part.split("-") for part in text.split(",")]
        seeds = [seed for part in parts for seed in range(int(part[0]), int(part[-1]) + 1)]
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) != len(seeds):
        raise ConfigError(f"--seeds {text!r} names no seeds, or one twice. Use 0,1,2 or 0-4.")
    return seeds
