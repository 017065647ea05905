"""Folds of a walk-forward as tasks: one agent trained on bars before its test, and its decisions on that test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tailguard.env.dataset import Dataset, split_rules
from tailguard.errors import ConfigError
from tailguard.evaluation.backtest import backtest
from tailguard.experiment import DataTask, Experiment, ExperimentConfig, saved_experiment
from tailguard.market.splits import Split
from tailguard.market.splits import walk_forward as splits_forward
from tailguard.population.runs import trained_to_the_end, with_one_core
from tailguard.population.tasks import Beat, Task
from tailguard.ppo import DistributionalPPO
from tailguard.run import RunFolder, newest_checkpoint

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Job:
    """One agent of one fold: small enough to send to another process, complete enough to run alone."""

    config_yaml: Path
    place: Path
    fold: int
    folds: int
    seed: int


@dataclass(frozen=True)
class FoldResult:
    """The decisions of one agent on its test segment."""

    fold: int
    seed: int
    first: int
    targets: Array
    step: int


def fold_task(job: Job) -> Task:
    """A job as plain values; its paths must be the same on every machine that may do it."""
    paths = {"config_yaml": str(job.config_yaml.resolve()), "place": str(job.place.resolve())}
    return Task(f"fold {job.fold + 1}, seed {job.seed}", "fold", asdict(job) | paths)


def fold_result(result: Mapping[str, Any]) -> FoldResult:
    """What `perform_fold` gave, also after it went through JSON, which keeps every bit of a float."""
    return FoldResult(**{**result, "targets": np.asarray(result["targets"], np.float64)})


def perform_fold(payload: Mapping[str, Any], beat: Beat) -> Mapping[str, Any]:
    """A fold as a task."""
    job = Job(**{**payload, "config_yaml": Path(payload["config_yaml"]), "place": Path(payload["place"])})
    found = run_fold(job, beat)
    return {**vars(found), "targets": found.targets.tolist()}


def run_fold(job: Job, beat: Beat = lambda: None) -> FoldResult:
    """Train an agent on one fold, or take the finished one from disk, and let it decide on the fold's test."""
    config = saved_experiment(job.config_yaml)
    task = bars_of(Experiment(config))
    split = fold_splits(config, len(task.bars), job.folds)[job.fold]
    short = task.config.replace(episode_length=min(task.config.episode_length, max(len(split.train) // 2, 1)))
    data = Dataset.of(short, task.bars, split=split)
    own = Experiment(with_one_core(config.replace(seed=job.seed)))
    folder = RunFolder(job.place)
    with folder.lock():
        trained_to_the_end(own, folder, beat, lambda: data.training_env(config.n_envs, job.seed))
        agent = DistributionalPPO.load(newest_checkpoint(folder))
    test = split.test
    found = backtest(data.exam_env(), agent, test.start, test.stop, warm_up=test.start - test.warm_start)
    return FoldResult(job.fold, job.seed, test.start, found.targets, agent.num_timesteps)


def bars_of(experiment: Experiment) -> DataTask:
    """The task of an experiment on a user's own bars; without bars there is no order in time to walk along."""
    if not isinstance(experiment.task, DataTask):
        raise ConfigError("A walk-forward needs bars with a time order: give --data FILE.")
    return experiment.task


def fold_splits(config: ExperimentConfig, n_bars: int, folds: int) -> tuple[Split, ...]:
    if config.data is None:
        raise ConfigError("A walk-forward needs bars with a time order: give --data FILE.")
    return splits_forward(n_bars, split_rules(config.data), folds=folds)
