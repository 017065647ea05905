"""`tailguard train` and `tailguard resume`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from tailguard.checkpoint import write_file
from tailguard.cli.evaluate import Say, conclude, introduce
from tailguard.cli.progress import Display, display_of
from tailguard.config_edits import ConfigEdits
from tailguard.errors import ConfigError, TailguardError
from tailguard.examination import remember
from tailguard.experiment import Experiment, ExperimentConfig, load_experiment, saved_experiment
from tailguard.files import LARGEST_TEXT, read_text
from tailguard.ppo import DistributionalPPO
from tailguard.run import RunFolder, StoppedNow, resumed, run_path, train
from tailguard.run.records import rows_of

LONGEST_CHOSEN_NAME = 150
"""Bytes of a run's name that is chosen from the name of a file of bars."""


def start(
    config_file: Path | None,
    given: Mapping[str, Any],
    overrides: Sequence[str],
    run: str | None,
    kind: str,
    dry_run: bool,
    report: bool | None = None,
    fail_on_alert: bool = False,
) -> None:
    """Begin a run."""
    config = load_experiment(config_file, given, overrides)
    if dry_run:
        typer.echo(config.to_yaml(), nl=False)
        return
    folder = begin(config, RunFolder(run_path(run)) if run is not None else None, display_of(kind), sys.argv, report)
    if fail_on_alert:
        exit_on_alerts(folder)


def begin(
    config: ExperimentConfig, folder: RunFolder | None, display: Display, command: Sequence[str], report: bool | None
) -> RunFolder:
    """Train an agent in a new run, whose folder is chosen where it is None, and examine it; returns the folder."""
    experiment = Experiment(config)
    folder = folder or RunFolder(free_path(f"{experiment.task.name}-{config.seed}"))
    with folder.lock():
        introduce(experiment, display.notice)
        say_length(experiment.config, display.notice)
        env = experiment.training_env()
        agent = experiment.agent(env)
        folder.create(config.to_yaml(), {**experiment.manifest(env, command), "report": report})
        remember(experiment.task, folder.path)
        run_on(agent, experiment, folder, display, report)
    return folder


def say_length(config: ExperimentConfig, say: Say) -> None:
    """Training goes by whole rollouts: where that changes its length, say so before it begins."""
    rollout = config.n_envs * config.ppo.n_steps
    trained = -(-config.steps // rollout) * rollout
    if trained != config.steps:
        shorter = "; for less set ppo.n_steps or n_envs lower" if config.steps < rollout else ""
        say(
            f"{config.steps:,} steps are asked for and {trained:,} will be trained, in whole rollouts of "
            f"{config.n_envs} x {config.ppo.n_steps} = {rollout:,}{shorter}"
        )


def exit_on_alerts(folder: RunFolder) -> None:
    """End with 1 when the training raised an alert, at any time; say which."""
    rows = rows_of(folder.alerts_file) if folder.alerts_file.exists() else ()
    raised = {str(row.get("alert", "an alert without name")) for row in rows}
    if raised:
        typer.echo(f"alerts were raised: {', '.join(sorted(raised))}; see {folder.alerts_file}", err=True)
        raise typer.Exit(1)


def go_on(run: str, kind: str, fail_on_alert: bool = False, steps: int | None = None) -> None:
    """Take a run up again, and train it to `steps` in all where these are given."""
    folder, display = RunFolder(run_path(run)), display_of(kind)
    folder.require_single_agent()
    with folder.lock():
        if steps is not None:
            lengthen(folder, steps)
        experiment = Experiment(saved_experiment(folder.config_file))
        config, edits = experiment.config, ConfigEdits(folder, experiment.config)
        agent = resumed(folder, experiment.training_env, experiment.agent, config.checkpoint, edits.settings_for)
        if agent.num_timesteps == 0:
            remember(experiment.task, folder.path)
        for line in edits.accept(agent.num_timesteps):
            display.notice(line)
        display.notice(f"{folder.path} goes on at step {agent.num_timesteps:,}")
        run_on(agent, experiment, folder, display, report_wanted(folder))
    if fail_on_alert:
        exit_on_alerts(folder)


def lengthen(folder: RunFolder, steps: int) -> None:
    """Write another number of steps into a run's configuration; the rest of the file stays as it is."""
    trained = max(folder.steps(), default=0)
    if steps <= trained:
        raise ConfigError(f"--steps {steps:,} counts from the beginning, and {folder.path} has trained {trained:,}.")
    saved_experiment(folder.config_file).replace(steps=steps)
    text = read_text(folder.config_file, LARGEST_TEXT, ConfigError)
    edited, n_lines = re.subn(r"(?m)^steps:.*$", f"steps: {steps}", text)
    if n_lines == 0:
        edited = f"{text.rstrip()}\nsteps: {steps}\n"
    write_file(folder.config_file, edited.encode())


def report_wanted(folder: RunFolder) -> bool | None:
    """What the run was begun with: --report, --no-report, or None for neither."""
    said = folder.manifest()
    command = said.get("command") or []
    given = {"--report": True, "--no-report": False}
    return said.get("report", next((given[word] for word in command if word in given), None))


def run_on(
    agent: DistributionalPPO, experiment: Experiment, folder: RunFolder, display: Display, report: bool | None = None
) -> None:
    """Train to the end or to a stop, and say where things are."""
    config = experiment.config
    again = f"tailguard resume {folder.handle}"
    try:
        with display.shown(agent.num_timesteps, config.steps):
            outcome = train(agent, folder, config.steps, config.checkpoint, display.listener)
    except StoppedNow as stop:
        display.notice(f"{stop}; go on from the last checkpoint with `{again}`.")
        raise typer.Exit(stop.exit_code) from None
    except TailguardError as error:
        raise type(error)(f"{error}\nWhat was saved is intact; `{again}` goes on from the last checkpoint.") from error
    if outcome.finished:
        display.notice(f"trained {outcome.step:,} steps; the agent is in {outcome.checkpoint}")
        conclude(experiment, folder, display.notice, report)
    else:
        display.notice(f"stopped at step {outcome.step:,} of {config.steps:,}; go on with `{again}`")


def free_path(name: str) -> Path:
    """runs/NAME, or the first of runs/NAME-2, runs/NAME-3, ... that is free."""
    name = "".join(mark for mark in name if mark.isprintable())
    name = name.encode()[-LONGEST_CHOSEN_NAME:].decode(errors="ignore").strip() or "run"
    place, number = run_path(name), 1
    while place.exists():
        number += 1
        place = run_path(f"{name}-{number}")
    return place
