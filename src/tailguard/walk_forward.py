"""Walk-forward: k folds in time, s seeds each, every agent trained on bars before its test and on nothing else.

    result = walk_forward(config, RunFolder("runs/btc-forward"), WalkForwardConfig(folds=5, seeds=3, workers=2))

The agents of one seed hand over to each other, fold by fold, in one account from the first test bar to the last: their
recorded decisions are followed, so a change of agents pays for its trades. The curve of the run is the mean of the
seeds' decisions, never the best seed; each seed is a trial of its own.

    runs/NAME/folds/fold-1-seed-0/    a run like any other, with metrics and checkpoints
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tailguard.configuration import Config, Several, Threads
from tailguard.errors import RunError
from tailguard.evaluation import ledger, measures
from tailguard.evaluation.assessment import Assessment, Fold, Subject, trial_of
from tailguard.evaluation.backtest import Backtest, follow_targets
from tailguard.examination import WALK_FORWARD, Exam, conclude, settings_digest
from tailguard.experiment import DataTask, Experiment, ExperimentConfig
from tailguard.market.features import FeatureSet
from tailguard.market.splits import Split, picture
from tailguard.population.folds import FoldResult, Job, bars_of, fold_result, fold_splits, fold_task
from tailguard.population.local import LocalExecutor
from tailguard.population.runs import begin
from tailguard.population.tasks import HANG_TIMEOUT_S, MAX_FAILURES, Executor, InlineExecutor, Outcome, run_all
from tailguard.run import RunFolder

Array = npt.NDArray[np.float64]
Say = Callable[[str], object]
Follow = Callable[[Array, int], Backtest]


class WalkForwardConfig(Config):
    """How often the data is walked, and by how many."""

    folds: Several = 5
    """Test segments, one after the other; train is four times as long and slides with them."""
    seeds: Several = 3
    """Agents per fold, from the seed of the configuration on."""
    workers: Threads = 2
    """Processes that train at the same time."""


def walk_forward(
    config: ExperimentConfig,
    folder: RunFolder,
    settings: WalkForwardConfig,
    say: Say = lambda text: None,
    executor: Executor | None = None,
) -> Assessment:
    """Train every fold and seed, join their decisions, assess the curve and write its report.

    What is finished stays finished: the same call goes on where an earlier one was stopped.
    executor: where the agents train; without one, in `workers` processes, or in this one when they are one
    """
    experiment = Experiment(config)
    task = bars_of(experiment)
    begin(folder, experiment, [WALK_FORWARD])
    splits = fold_splits(config, len(task.bars), settings.folds)
    say(picture(splits))
    seeds = range(config.seed, config.seed + settings.seeds)
    jobs = [
        Job(folder.config_file, folder.path / "folds" / f"fold-{fold + 1}-seed-{seed}", fold, settings.folds, seed)
        for seed in seeds
        for fold in range(settings.folds)
    ]
    working = executor or local_executor(folder, settings.workers)
    try:
        results = run_jobs(jobs, working, partial(tell, task, settings.folds, say))
    finally:
        if executor is None:
            working.close()
    return join(experiment, task, folder, splits, results, list(seeds))


def local_executor(folder: RunFolder, workers: int) -> Executor:
    return InlineExecutor() if workers == 1 else LocalExecutor(workers, HANG_TIMEOUT_S, folder.path / "logs")


def run_jobs(
    jobs: Sequence[Job], executor: Executor, tell: Callable[[FoldResult], None]
) -> dict[tuple[int, int], FoldResult]:
    """The results by seed and fold; the order in which they come changes nothing."""
    results: dict[tuple[int, int], FoldResult] = {}
    failed: dict[str, str] = {}

    def take(outcome: Outcome) -> None:
        if outcome.result is None:
            failed[outcome.key] = outcome.reason
            return
        found = fold_result(outcome.result)
        results[found.seed, found.fold] = found
        tell(found)

    if run_all(executor, [fold_task(job) for job in jobs], MAX_FAILURES, take):
        given_up = [job for job in jobs if (job.seed, job.fold) not in results]
        key = fold_task(given_up[0]).key
        raise RunError(
            f"{len(given_up)} of {len(jobs)} agents could not be trained; {key}: {failed[key]}. What is finished "
            "stays, and the same command goes on."
        )
    return results


def tell(task: DataTask, folds: int, say: Say, found: FoldResult) -> None:
    """A line on one agent alone."""
    data = task.config
    alone = follow_targets(task.bars, found.targets, found.first, costs=data.costs, account=data.account)
    sharpe = measures.sharpe(alone.returns, alone.bars_per_year)
    say(f"fold {found.fold + 1} of {folds}, seed {found.seed}: out-of-sample Sharpe {sharpe:.2f}")


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
        split=WALK_FORWARD,
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
        split=WALK_FORWARD,
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
        own = replace(subject, seed=result.seed, split=f"{WALK_FORWARD} fold {result.fold + 1}", step=result.step)
        ledger.record(folder.path, trial_of(own, alone(result.targets, result.first), result.fold))
    for i, curve in enumerate(curves):
        ledger.record(folder.path, trial_of(replace(subject, seed=subject.seed + i), curve))
