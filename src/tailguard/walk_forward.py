"""Walk-forward: k folds in time, s seeds each, every agent trained on bars before its test and on nothing else.

    result = walk_forward(config, RunFolder("runs/btc-forward"), WalkForwardConfig(folds=5, seeds=3, workers=2))

The agents of one seed hand over to each other, fold by fold, in one account from the first test bar to the last: their
recorded decisions are followed, so a change of agents pays for its trades. The curve of the run is the mean of the
seeds' decisions, never the best seed; each seed is a trial of its own.

    runs/NAME/folds/fold-1-seed-0/    a run like any other, with metrics and checkpoints
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tailguard.configuration import Config, PositiveInt
from tailguard.env.dataset import Dataset, split_rules
from tailguard.errors import ConfigError
from tailguard.evaluation import ledger, measures
from tailguard.evaluation.assessment import Assessment, Fold, Subject, trial_of
from tailguard.evaluation.backtest import Backtest, backtest, follow_targets
from tailguard.examination import Exam, conclude, settings_digest
from tailguard.experiment import DataTask, Experiment, ExperimentConfig, load_experiment
from tailguard.market.features import FeatureSet
from tailguard.market.splits import Split, picture
from tailguard.market.splits import walk_forward as splits_forward
from tailguard.ppo import DistributionalPPO
from tailguard.run import RunFolder, train

Array = npt.NDArray[np.float64]
Say = Callable[[str], object]
Follow = Callable[[Array, int], Backtest]

SPLIT = "walk-forward"


class WalkForwardConfig(Config):
    """How often the data is walked, and by how many."""

    folds: PositiveInt = 5
    """Test segments, one after the other; train is four times as long and slides with them."""
    seeds: PositiveInt = 3
    """Agents per fold, from the seed of the configuration on."""
    workers: PositiveInt = 2
    """Processes that train at the same time."""


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


def fold_splits(config: ExperimentConfig, n_bars: int, folds: int) -> tuple[Split, ...]:
    if config.data is None:
        raise ConfigError("A walk-forward needs bars with a time order: give --data FILE.")
    return splits_forward(n_bars, split_rules(config.data), folds=folds)


def run_fold(job: Job) -> FoldResult:
    """Train an agent on one fold, or take the finished one from disk, and let it decide on the fold's test."""
    config = load_experiment(job.config_yaml)
    task = Experiment(config).task
    if not isinstance(task, DataTask):
        raise ConfigError("A walk-forward needs bars with a time order: give --data FILE.")
    split = fold_splits(config, len(task.bars), job.folds)[job.fold]
    short = task.config.replace(episode_length=min(task.config.episode_length, max(len(split.train) // 2, 1)))
    data = Dataset.of(short, task.bars, split=split)
    own = config.replace(seed=job.seed)
    folder = RunFolder(job.place)
    with folder.lock():
        if not (folder.steps() and folder.steps()[-1] >= own.steps):
            agent = Experiment(own).agent(data.training_env(own.n_envs, own.seed))
            train(agent, folder, own.steps, own.checkpoint)
        agent = DistributionalPPO.load(folder.last_checkpoint())
    test = split.test
    found = backtest(data.exam_env(), agent, test.start, test.stop, warm_up=test.start - test.warm_start)
    return FoldResult(job.fold, job.seed, test.start, found.targets, agent.num_timesteps)


def run_jobs(jobs: list[Job], workers: int) -> Iterator[FoldResult]:
    """Results as they come; one worker works in this process."""
    if workers == 1:
        yield from (run_fold(job) for job in jobs)
        return
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(run_fold, job) for job in jobs]
        try:
            for done in as_completed(waiting):
                yield done.result()
        except BaseException:
            for job in waiting:
                job.cancel()
            raise


def walk_forward(
    config: ExperimentConfig, folder: RunFolder, settings: WalkForwardConfig, say: Say = lambda text: None
) -> Assessment:
    """Train every fold and seed, join their decisions, assess the curve and write its report.

    What is finished stays finished: the same call goes on where an earlier one was stopped.
    """
    experiment = Experiment(config)
    task = experiment.task
    if not isinstance(task, DataTask):
        raise ConfigError("A walk-forward needs bars with a time order: give --data FILE.")
    begin(folder, experiment)
    splits = fold_splits(config, len(task.bars), settings.folds)
    say(picture(splits))
    seeds = range(config.seed, config.seed + settings.seeds)
    jobs = [
        Job(folder.config_file, folder.path / "folds" / f"fold-{fold + 1}-seed-{seed}", fold, settings.folds, seed)
        for seed in seeds
        for fold in range(settings.folds)
    ]
    data = task.config
    results: dict[tuple[int, int], FoldResult] = {}
    for found in run_jobs(jobs, settings.workers):
        results[found.seed, found.fold] = found
        alone = follow_targets(task.bars, found.targets, found.first, costs=data.costs, account=data.account)
        sharpe = measures.sharpe(alone.returns, alone.bars_per_year)
        say(f"fold {found.fold + 1} of {settings.folds}, seed {found.seed}: out-of-sample Sharpe {sharpe:.2f}")
    return join(experiment, task, folder, splits, results, list(seeds))


def begin(folder: RunFolder, experiment: Experiment) -> None:
    """Write down what the run is, or make sure that the folder holds the same."""
    if folder.config_file.exists():
        if load_experiment(folder.config_file) != experiment.config:
            raise ConfigError(f"{folder.path} holds a run with other settings. Choose another --run.")
        return
    folder.create(experiment.config.to_yaml(), experiment.manifest(experiment.training_env(), [SPLIT]))


def join(
    experiment: Experiment,
    task: DataTask,
    folder: RunFolder,
    splits: tuple[Split, ...],
    results: dict[tuple[int, int], FoldResult],
    seeds: list[int],
) -> Assessment:
    """One account per seed over all folds, one for the mean of their decisions, and the assessment of that one."""
    bars, data, first = task.bars, task.config, splits[0].test.start

    def followed(targets: Array, start: int = first) -> Backtest:
        return follow_targets(bars, targets, start, costs=data.costs, account=data.account)

    decisions = np.stack(
        [np.concatenate([results[seed, fold].targets for fold in range(len(splits))]) for seed in seeds]
    )
    curves = [followed(targets) for targets in decisions]
    whole = followed(decisions.mean(axis=0)) if len(seeds) > 1 else curves[0]
    sharpes = ", ".join(
        f"{seed}: {measures.sharpe(curve.returns, curve.bars_per_year):.2f}"
        for seed, curve in zip(seeds, curves, strict=True)
    )
    subject = Subject(
        run=folder.name,
        source=", ".join(Path(file).name for file in data.files),
        data=bars.digest(),
        split=SPLIT,
        seed=seeds[0],
        step=max(result.step for result in results.values()),
        config=settings_digest(experiment.config),
        gamma=experiment.config.ppo.gamma,
        facts=(
            ("Folds", picture(splits, 60)),
            ("Seeds", f"the curve is the mean decision of {len(seeds)}; Sharpe ratio of each alone: {sharpes}"),
            ("Warm-up of the memory", f"{data.warm_up} bars of the embargo before each fold, without trading"),
            ("Scalers", "one per fold, fitted on its train"),
        ),
    )
    enter(folder, subject, results.values(), curves if len(seeds) > 1 else [], followed)
    exam = Exam(
        env=task.dataset.exam_env(),
        start=first,
        stop=splits[-1].test.stop,
        warm_up=data.warm_up,
        source=subject.source,
        data=subject.data,
        split=SPLIT,
        features=FeatureSet(data.features),
    )
    return conclude(
        folder,
        exam,
        whole,
        subject,
        folds=tuple(Fold(f"fold {i + 1}", split.test.start - first) for i, split in enumerate(splits)),
        other_trials=np.column_stack([curve.returns for curve in curves]) if len(seeds) > 1 else None,
    )


def enter(
    folder: RunFolder, subject: Subject, results: Iterable[FoldResult], curves: Sequence[Backtest], alone: Follow
) -> None:
    """A row per fold and seed, under the fold's own bars, and one per seed for its whole curve."""
    for result in sorted(results, key=lambda result: (result.seed, result.fold)):
        own = replace(subject, seed=result.seed, split=f"{SPLIT} fold {result.fold + 1}", step=result.step)
        ledger.record(folder.path, trial_of(own, alone(result.targets, result.first), result.fold))
    for i, curve in enumerate(curves):
        ledger.record(folder.path, trial_of(replace(subject, seed=subject.seed + i), curve))
