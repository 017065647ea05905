"""Independent runs on an executor: the same experiment with several seeds, each in a run folder of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tailguard.examination import remember
from tailguard.experiment import Experiment, ExperimentConfig, experiment_config
from tailguard.population.tasks import Beat, Task
from tailguard.run import Listener, RunFolder, resumed, train
from tailguard.yaml_files import parse_yaml


def seed_tasks(config: ExperimentConfig, seeds: Sequence[int], place: Path, command: Sequence[str]) -> list[Task]:
    """One training per seed, in folders beside each other: NAME-seed-0, NAME-seed-1, ..."""
    ppo = config.ppo.replace(update_threads=config.ppo.update_threads or 1)  # runs share the machine
    return [
        Task(
            key=str(seed),
            kind="train",
            payload={
                "folder": str(place.with_name(f"{place.name}-seed-{seed}").resolve()),
                "config": config.replace(seed=seed, ppo=ppo).to_yaml(),
                "command": list(command),
            },
        )
        for seed in seeds
    ]


def perform_training(payload: Mapping[str, Any], beat: Beat) -> Mapping[str, Any]:
    """A whole training as a task: begun, or gone on with where an earlier attempt stopped."""
    folder = RunFolder(payload["folder"])
    experiment = Experiment(experiment_config(parse_yaml(payload["config"], "config.yaml")))
    config = experiment.config
    with folder.lock():
        if not folder.config_file.exists():
            env = experiment.training_env()
            folder.create(config.to_yaml(), experiment.manifest(env, list(payload["command"])))
            remember(experiment.task, folder.path)
        agent = resumed(folder, experiment.training_env, experiment.agent, config.checkpoint)
        outcome = train(agent, folder, config.steps, config.checkpoint, Listener(update=lambda update: beat()))
    return {"step": outcome.step, "folder": str(folder.path), "checkpoint": str(outcome.checkpoint)}
