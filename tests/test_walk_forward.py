"""Walk-forward: one account over all folds, agents that saw only earlier bars, trials counted, stops survived."""

from __future__ import annotations

import json
import os
import signal
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_array_equal

from tailguard.cli.evaluate import evaluate_run, report_run, walk
from tailguard.cli.train import go_on
from tailguard.env.dataset import Dataset
from tailguard.errors import ConfigError, RunError
from tailguard.evaluation import ledger
from tailguard.evaluation.backtest import follow_targets
from tailguard.experiment import experiment_config
from tailguard.population.folds import Job, fold_result, fold_splits, fold_task, run_fold
from tailguard.population.tasks import InlineExecutor, Outcome, perform
from tailguard.robustness.runs import experiment_of
from tailguard.run import RunFolder, StoppedNow
from tailguard.walk_forward import WalkForwardConfig, walk_forward
from tests.market.market_data import random_bars
from tests.test_examination import TINY


def settings(place, seed: int = 0, n: int = 500, more: tuple[str, ...] = ()):
    path = place / "bars.parquet"
    if not path.exists():
        random_bars(n, ("AAA", "BBB")).frame.write_parquet(path)
    return experiment_config({"data": {"files": [str(path)]}, "seed": seed}, [*TINY, *more])


def job(place, folder: RunFolder, fold: int, seed: int = 0) -> Job:
    return Job(folder.config_file, place / f"alone-{fold}-{seed}", fold, 3, seed)


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    place = tmp_path_factory.mktemp("walk")
    folder = RunFolder(place / "runs" / "forward")
    said: list[str] = []
    result = walk_forward(settings(place), folder, WalkForwardConfig(folds=3, seeds=2, workers=1), said.append)
    return place, folder, result, said


def test_the_curve_is_one_account_that_follows_the_mean_decision_of_the_seeds(walked):
    place, folder, result, _ = walked
    config = settings(place)
    bars = Dataset.load(config.data).bars
    splits = fold_splits(config, len(bars), 3)
    alone = {(fold, seed): run_fold(job(place, folder, fold, seed)) for fold in range(3) for seed in range(2)}
    mean = np.concatenate([(alone[fold, 0].targets + alone[fold, 1].targets) / 2 for fold in range(3)])
    first = splits[0].test.start
    expected = follow_targets(bars, mean, first, costs=config.data.costs, account=config.data.account)
    assert_array_equal(result.strategy.returns, expected.returns)
    assert [fold.first for fold in result.folds] == [split.test.start - first for split in splits]
    assert len(result.strategy) == splits[-1].test.stop - first


def test_every_agent_has_seen_only_bars_before_its_test(walked):
    """Rewriting everything from the fold's test on leaves its training, and so its first decision, untouched."""
    place, folder, _, _ = walked
    config = settings(place)
    bars = Dataset.load(config.data).bars
    split = fold_splits(config, len(bars), 3)[1]
    assert split.train.reward_stop <= split.test.warm_start
    other = place / "rewritten"
    other.mkdir()
    bars.scale_after(split.test.start, 3.0).frame.write_parquet(other / "bars.parquet")
    elsewhere = RunFolder(other / "run")
    elsewhere.create(settings(other).to_yaml(), {})
    ours, theirs = run_fold(job(place, folder, 1)), run_fold(job(other, elsewhere, 1))
    assert_array_equal(ours.targets[0], theirs.targets[0])
    assert not np.array_equal(ours.targets, theirs.targets)


def test_each_seed_fold_and_look_is_a_row(walked):
    _, folder, result, _ = walked
    rows = ledger.read(folder.path)
    assert sum(row.fold is not None for row in rows) == 6
    assert sum(row.split == "walk-forward" for row in rows) == 3  # two seeds and their mean
    assert result.verdict.n_trials == 3
    assert result.overfitting is not None
    assert {row.seed for row in rows} == {0, 1}


def test_the_report_shows_the_folds(walked):
    _, folder, _, said = walked
    text = (folder.path / "report.html").read_text()
    assert all(f"fold {i}" in text for i in (1, 2, 3))
    assert "the curve is the mean decision of 2" in text
    assert "No alert in" in text or "warn/" in text  # the folds' own records are found
    assert sum("out-of-sample Sharpe" in line for line in said) == 6


def test_what_is_finished_stays_finished(walked):
    place, folder, result, _ = walked
    before = {path: path.stat().st_mtime_ns for path in folder.path.glob("folds/*/checkpoints/*/manifest.json")}
    assert len(before) == 6
    again = walk_forward(settings(place), folder, WalkForwardConfig(folds=3, seeds=2, workers=1))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert_array_equal(again.strategy.returns, result.strategy.returns)
    assert again.verdict.n_trials == 3  # the same results, looked at twice
    with pytest.raises(ConfigError, match="other settings"):
        walk_forward(settings(place, seed=5), folder, WalkForwardConfig(folds=3))


def test_the_command_says_the_verdict_and_its_report_can_be_written_again(walked, capsys):
    place, folder, _, _ = walked
    walk(settings(place), folder.path, WalkForwardConfig(folds=3, seeds=2, workers=1), quiet=True)
    said = capsys.readouterr().out
    assert "evidence of skill" in said.lower()
    assert "walk-forward, " in said
    text = (folder.path / "report.html").read_text()
    report_run(str(folder.path), None)
    assert (folder.path / "report.html").read_text() == text


def test_the_weights_of_its_curve_can_be_exported_without_another_look(walked, capsys):
    place, folder, result, _ = walked
    looks = len(ledger.read(folder.path))
    evaluate_run(str(folder.path), [], "test", place / "w.parquet")
    said = capsys.readouterr().out
    assert "walk-forward, " in said
    assert str(folder.path / "report.html") in said
    weights = pl.read_parquet(place / "w.parquet")
    assert weights["symbol"].unique().sort().to_list() == ["AAA", "BBB"]
    assert_array_equal(weights["weight"].to_numpy().reshape(-1, 2), result.strategy.requested)
    assert weights["fill_at"][0].timestamp() == result.strategy.fill_at[0].astype(int) / 1000
    assert len(ledger.read(folder.path)) == looks


@pytest.mark.parametrize(
    "use",
    [
        lambda folder: evaluate_run(str(folder.path), [folder.path / "new.parquet"], "test", None),
        lambda folder: evaluate_run(str(folder.path), [], "train", None),
        lambda folder: experiment_of(folder),  # of an attack
        lambda folder: go_on(str(folder.path), "quiet"),
    ],
)
def test_what_needs_one_agent_says_that_a_walk_forward_has_many(use, walked):
    _, folder, _, _ = walked
    before = sorted(folder.path.iterdir())
    with pytest.raises(ConfigError, match="every fold and seed has an agent of its own"):
        use(folder)
    assert sorted(folder.path.iterdir()) == before


def test_folds_follow_one_another_and_need_bars(tmp_path):
    config = settings(tmp_path)
    splits = fold_splits(config, 500, 4)
    assert all(after.test.start == before.test.stop for before, after in pairwise(splits))
    with pytest.raises(ConfigError, match="give --data"):
        walk_forward(experiment_config({"preset": "signal"}), RunFolder(tmp_path / "x"), WalkForwardConfig())


def test_a_fold_that_travels_as_json_is_bit_for_bit_the_fold(walked):
    place, folder, _, _ = walked
    own = job(place, folder, 2, seed=1)
    task = fold_task(own)
    sent = json.loads(json.dumps(dict(task.payload)))
    found = fold_result(json.loads(json.dumps(dict(perform(task.kind, sent, lambda: None)))))
    expected = run_fold(own)
    assert_array_equal(found.targets, expected.targets)
    assert (found.fold, found.seed, found.first, found.step) == (2, 1, expected.first, expected.step)


def test_a_fold_that_is_stopped_gives_no_decisions_and_goes_on_to_the_same_ones(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create(settings(tmp_path, more=("steps=384",)).to_yaml(), {})
    expected = run_fold(job(tmp_path / "whole", folder, 0))
    stopped = job(tmp_path / "stopped", folder, 0)
    with pytest.raises(StoppedNow):
        run_fold(stopped, beat=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert RunFolder(stopped.place).steps()[-1] < 384
    found = run_fold(stopped)
    assert_array_equal(found.targets, expected.targets)
    assert found.step == expected.step == 384


def test_agents_that_cannot_be_trained_are_named_with_the_reason(walked):
    class Unlucky(InlineExecutor):
        def wait(self, timeout_s: float) -> list[Outcome]:
            if "seed 1" in self.tasks[0].key:
                return [Outcome(self.tasks.popleft().key, None, "no luck")]
            return super().wait(timeout_s)

    place, folder, _, _ = walked
    with pytest.raises(RunError, match=r"3 of 6 agents .* fold 1, seed 1: no luck"):
        walk_forward(settings(place), folder, WalkForwardConfig(folds=3, seeds=2), executor=Unlucky())


@pytest.mark.slow
def test_a_ray_cluster_gives_the_same_curve_as_one_process(walked, tmp_path):
    pytest.importorskip("ray")
    from tailguard.population.ray_runner import RayExecutor

    place, _, result, _ = walked
    folder = RunFolder(tmp_path / "ray")
    executor = RayExecutor("local", 600.0, folder.path / "beats", n_cpus=2)
    try:
        again = walk_forward(settings(place), folder, WalkForwardConfig(folds=3, seeds=2), executor=executor)
    finally:
        executor.close()
    assert_array_equal(again.strategy.returns, result.strategy.returns)


@pytest.mark.slow
def test_processes_give_the_same_curve_as_one(walked, tmp_path):
    place, _, result, _ = walked
    again = walk_forward(settings(place), RunFolder(tmp_path / "two"), WalkForwardConfig(folds=3, seeds=2, workers=2))
    assert_array_equal(again.strategy.returns, result.strategy.returns)
