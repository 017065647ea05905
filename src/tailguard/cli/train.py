"""`tailguard train` and `tailguard resume`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import typer

from tailguard.experiment import Experiment, load_experiment
from tailguard.run import RunFolder, run_path, train

Display = Literal["live", "json", "quiet"]


def start(
    config_file: Path | None,
    given: Mapping[str, Any],
    overrides: Sequence[str],
    run: str | None,
    display: Display,
    dry_run: bool,
) -> None:
    """Begin a run."""
    config = load_experiment(config_file, given, overrides)
    if dry_run:
        typer.echo(config.to_yaml(), nl=False)
        return
    experiment = Experiment(config)
    folder = RunFolder(run_path(run) if run is not None else free_path(f"{experiment.task.name}-{config.seed}"))
    with folder.lock():
        folder.create(config.to_yaml(), {"seed": config.seed, "command": sys.argv})
        outcome = train(experiment.agent(), folder, config.steps, config.checkpoint)
    if display != "quiet":
        typer.echo(f"trained {outcome.step:,} steps; the agent is in {outcome.checkpoint}")


def free_path(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that is free."""
    place, number = run_path(name), 1
    while place.exists():
        number += 1
        place = run_path(f"{name}-{number}")
    return place
