"""Independent runs on an executor: the same experiment with several seeds, each in a run folder of its own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stable_baselines3.common.vec_env import VecEnv

from tailguard.config_edits import differences, refuse_edits
from tailguard.errors import ConfigError
from tailguard.examination import remember
from tailguard.experiment import Experiment, ExperimentConfig, experiment_config, saved_experiment
from tailguard.population.tasks import Beat, Task
from tailguard.run import Listener, Outcome, RunFolder, StoppedNow, resumed, train
from tailguard.yaml_files import parse_yaml


def with_one_core(config: ExperimentConfig) -> ExperimentConfig:
    """Trainings that share a machine keep to one core each, unless told otherwise; results do not depend on it."""
    return config.replace(ppo=config.ppo.replace(update_threads=config.ppo.update_threads or 1))


def seed_tasks(config: ExperimentConfig, seeds: Sequence[int], place: Path, command: Sequence[str]) -> list[Task]:
    """One training per seed, in folders beside each other: NAME-seed-0, NAME-seed-1, ..."""
    return [
        Task(
            key=str(seed),
            kind="train",
            payload={
                "folder": str(place.with_name(f"{place.name}-seed-{seed}").resolve()),
                "config": with_one_core(config.replace(seed=seed)).to_yaml(),
                "command": list(command),
            },
        )
        for seed in seeds
    ]


def perform_training(payload: Mapping[str, Any], beat: Beat) -> Mapping[str, Any]:
    """A whole training as a task: begun, or gone on with where an earlier attempt stopped."""
    folder = RunFolder(payload["folder"])
    experiment = Experiment(experiment_config(parse_yaml(payload["config"], "config.yaml")))
    with folder.lock():
        begin(folder, experiment, payload["command"])
        remember(experiment.task, folder.path)
        outcome = trained_to_the_end(experiment, folder, beat, experiment.training_env)
    return {"step": outcome.step, "folder": str(folder.path), "checkpoint": str(outcome.checkpoint)}


def begin(folder: RunFolder, experiment: Experiment, command: Sequence[str]) -> None:
    """Write down what the run is, or make sure that the folder holds the same."""
    if folder.config_file.exists():
        require_same_settings(folder, experiment.config)
    else:
        folder.create(experiment.config.to_yaml(), experiment.manifest(experiment.training_env(), list(command)))


def require_same_settings(folder: RunFolder, config: ExperimentConfig) -> None:
    """Refuse a folder whose run was begun with other settings: going on with it would mix the two."""
    if not folder.config_file.exists():
        return
    before, now = (each.model_dump(mode="json") for each in (saved_experiment(folder.config_file), config))
    found = list(differences(before, now))
    if found:
        told = "; ".join(f"{edit.key} is {edit.trained!r} there and {edit.written!r} here" for edit in found)
        raise ConfigError(f"{folder.path} holds a run with other settings: {told}. Choose another --run.")


def trained_to_the_end(
    experiment: Experiment, folder: RunFolder, beat: Beat, make_env: Callable[[], VecEnv]
) -> Outcome:
    """Train from the last checkpoint on, or from the beginning; hold the folder's lock.

    A training that a signal stopped is no result: whoever asked for it must not take half an agent for a whole one.
    """
    config = experiment.config
    agent = resumed(
        folder, make_env, experiment.agent, config.checkpoint, lambda place: refuse_edits(folder, config, place)
    )
    outcome = train(agent, folder, config.steps, config.checkpoint, Listener(update=lambda update: beat()))
    if not outcome.finished:
        raise StoppedNow(outcome.stopped_by or signal.SIGINT)
    return outcome
