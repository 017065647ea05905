"""The attack bench: curves, files, bounds, the picture in the report, and `tailguard attack`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tailguard.env import oracle_env
from tailguard.env.dataset import DataConfig, Dataset
from tailguard.errors import ConfigError, DataError
from tailguard.evaluation.attack_record import read_record
from tailguard.evaluation.report import render
from tailguard.evaluation.training_record import TrainingRecord
from tailguard.market.oracles import oracle_market
from tailguard.robustness.bench import AttackConfig, attack_agent, bounds_of, write_record
from tailguard.robustness.prices import ShownPrices
from tailguard.robustness.runs import attack_run, default_attacks, experiment_of, scaled_features
from tailguard.run import RunFolder
from tests.evaluation.results import assessed, foresight, market
from tests.robustness.test_attacks import REGIME, trading
from tests.runs import begin, tiny_experiment

SMALL = AttackConfig(attacks=("random", "mad"), epsilons=(0.1,), seeds=1, episodes=4)


def test_a_curve_starts_at_the_clean_return_and_sizes_rise() -> None:
    tried: list[str] = []
    config = SMALL.replace(epsilons=(0.2, 0.1), seeds=2)
    record = attack_agent(lambda seed: trading(), config, say=tried.append)
    assert tried == ["nobody"] + [f"{name} {size}" for name in ("random", "mad") for size in (0.1, 0.1, 0.2, 0.2)]
    for curve in record.curves:
        assert [point.epsilon for point in curve.points] == [0.0, 0.1, 0.2]
        assert curve.points[0] == record.curves[0].points[0]
        assert curve.points[0].change == 0.0
        assert 0.0 < curve.points[1].change < curve.points[2].change
        for point in curve.points:
            assert point.cvar <= point.mean_return == pytest.approx(np.mean(point.by_seed))
    assert set(record.strongest) == {"normalized"}


def test_the_record_survives_its_file(tmp_path: Path) -> None:
    record = attack_agent(lambda seed: trading(), SMALL.replace(attacks=("price",)), REGIME.features)
    assert {curve.unit for curve in record.curves} == {"bps"}
    write_record(record, tmp_path / "attack.json")
    assert read_record(tmp_path) == record
    assert read_record(tmp_path / "elsewhere") is None
    said = json.loads((tmp_path / "attack.json").read_text())
    (tmp_path / "attack.json").write_text(json.dumps({**said, "format": 0}))
    with pytest.raises(DataError, match="another version"):
        read_record(tmp_path)


def test_bounds_are_proven_at_small_sizes_and_hold_for_what_attacks_reach() -> None:
    bounds = bounds_of(trading(), SMALL)
    assert [bound.epsilon for bound in bounds] == pytest.approx([0.001, 0.01, 0.1] * 2)
    assert [bound.always for bound in bounds] == [False] * 3 + [True] * 3
    assert bounds[0].mean <= bounds[1].mean <= bounds[2].mean
    assert bounds[0].largest < bounds[3].largest <= bounds[3].range == 2.0
    assert "the present observation alone by 0.001 or less" in str(bounds[0].words)
    assert replace(bounds[0], largest=2.0).words is None
    reached = attack_agent(lambda seed: trading(), SMALL.replace(attacks=("mad",), epsilons=(0.001,)))
    assert reached.curves[0].points[1].change <= bounds[3].largest


def test_a_report_shows_the_curves_and_says_so_when_nobody_attacked() -> None:
    bars = market()
    result = assessed(bars, foresight(bars, 0.56))
    assert "Nobody attacked this agent" in render(result)
    config = SMALL.replace(attacks=("mad", "price-random"))
    record = attack_agent(lambda seed: trading(), config, REGIME.features)
    page = render(result, TrainingRecord(attacks=record))
    for words in (
        'id="chart-attacks-normalized"',
        'id="chart-attacks-bps"',
        "Certificate: moving the present observation alone",
        "5 bps",
    ):
        assert words in page, words


def test_recomputed_features_of_a_users_own_bars_are_those_of_the_environment() -> None:
    bars = market()
    data = Dataset.of(DataConfig(files=("x.csv",), warm_up=8, episode_length=20, costs={"impact": 0.0}), bars)
    env = data.training_env(4, 0)
    shown = ShownPrices(env, scaled_features(data), 5.0)
    truth = env.reset()
    seen = shown.features_of(np.ones((4, 1, shown.window, len(bars.symbols))))[:, 0]
    spared = env.attackable[: seen.shape[1]] == 0.0  # the clock is not taken from here
    np.testing.assert_allclose(seen[:, ~spared], truth[:, : seen.shape[1]][:, ~spared], atol=1e-3)


def test_a_run_is_attacked_and_keeps_the_record(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "first")
    begin(folder, tiny_experiment("cartpole", updates=2))
    assert default_attacks(experiment_of(folder)) == ("random", "critic", "mad")
    record = attack_run(folder, SMALL)
    assert read_record(folder.path) == record
    assert record.bounds == ()  # choices have no distance
    with pytest.raises(ConfigError, match="no bars"):
        attack_run(folder, SMALL.replace(attacks=("price",)))


def test_episodes_on_test_fit_a_short_test() -> None:
    bars = market()
    data = Dataset.of(DataConfig(files=("x.csv",), warm_up=8, episode_length=10_000, costs={"impact": 0.0}), bars)
    env = data.test_env(2, 0)
    assert env.length <= len(data.segment("test"))


def test_no_attack_is_refused() -> None:
    with pytest.raises(ConfigError, match="No attack"):
        attack_agent(lambda seed: trading(), SMALL.replace(attacks=()))


def test_every_embedded_market_can_be_attacked_in_its_prices() -> None:
    for name in ("signal", "noise", "pairs", "crash"):
        there = oracle_market(name)
        env = oracle_env(there, 2, n_bars=2_000, episode_length=20)
        shown = ShownPrices(env, there.features, 5.0)
        truth = env.reset()
        seen = shown.features_of(np.ones((2, 1, shown.window, len(env.bars.symbols))))[:, 0]
        np.testing.assert_allclose(seen, truth[:, : seen.shape[1]], atol=1e-5)
