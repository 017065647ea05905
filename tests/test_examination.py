"""From a file of bars to a report: train, evaluate, weights, other bars, trials; on a tiny budget."""

from __future__ import annotations

import json
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tailguard import DistributionalPPO
from tailguard.cli.evaluate import evaluate_run, introduce, report_run
from tailguard.cli.train import go_on, start
from tailguard.env import TradingVecEnv, limits_of, requested_weights
from tailguard.errors import ConfigError, DataError
from tailguard.evaluation import assessment as assessments
from tailguard.evaluation import backtest, ledger
from tailguard.evaluation.backtest import backtest_periods, follow_targets
from tailguard.examination import exam_of, examine, examined, preset_exam, remembered
from tailguard.experiment import DataTask, Experiment, PresetTask, experiment_config, load_experiment
from tailguard.market import load_bars
from tailguard.market.features import FeatureScaler, FeatureSet
from tailguard.presets import preset
from tailguard.run import RunFolder
from tests.evaluation.test_weights import rates, replayed
from tests.market.market_data import random_bars

TINY = [
    *("n_envs=4", "ppo.n_steps=32", "ppo.critic.n_quantiles=8", "policy_kwargs.lstm_hidden_size=8"),
    *("policy_kwargs.net_arch.pi=[8]", "policy_kwargs.net_arch.vf=[8]", "data.features=[return_1, return_4]"),
    *("data.warm_up=8", "steps=128"),
]
NARROW = ["data.account.gross_cap=0.008", "data.account.no_trade_band=0.0005"]
"""A cap and a band that bind although an agent of so few steps hardly dares to act."""


def write(path: Path, n: int = 700, symbols: tuple[str, ...] = ("AAA", "BBB"), seed: int = 0) -> Path:
    random_bars(n, symbols, seed=seed).frame.write_csv(path)
    return path


def train_here(run: str, seed: int = 0) -> None:
    start(None, {"data": {"files": ["bars.csv"]}, "seed": seed}, TINY, run, "quiet", False)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A place with bars and the finished run `first`; tests work on copies."""
    place = tmp_path_factory.mktemp("template")
    with chdir(place):
        write(place / "bars.csv")
        train_here("first")
    return place


@pytest.fixture
def here(template, tmp_path, monkeypatch) -> Path:
    copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def first(here) -> RunFolder:
    return RunFolder(here / "runs" / "first")


def test_training_on_a_file_ends_in_a_report_a_trial_and_an_evaluation(first):
    folder = first
    text = (folder.path / "report.html").read_text()
    assert "evidence of skill" in text.lower()
    assert "bars.csv" in text
    (trial,) = ledger.read(folder.path)
    assert (trial.split, trial.run, trial.seed, trial.step) == ("test", "first", 0, 128)
    table = pl.read_parquet(folder.path / "evaluation" / "test.parquet")
    named = {"decided_at", "fill_at", "return", "weight:AAA", "requested:BBB", "hold_return", "return:one bar late"}
    assert named <= set(table.columns)
    assert json.loads((folder.path / "manifest.json").read_text())["data"]["bars"] == trial.data
    assert table.height == trial.n_bars


def test_train_and_test_and_simple_rules_stand_side_by_side_in_report_json_and_on_the_console(first, capsys):
    """700 bars have no validation; a look at train does not look at test."""
    capsys.readouterr()
    evaluate_run("first", [], "test", None)
    printed = capsys.readouterr().out
    found = assessments.load(first.path / "evaluation", "test")
    places = {(result.strategy, result.part) for result in found.comparison}
    strategies = ("agent", "ridge regression", "buy and hold", "equal weight")
    assert places == {(name, part) for name in strategies for part in ("train", "test")}
    own = next(result for result in found.comparison if (result.strategy, result.part) == ("agent", "test"))
    assert_allclose(own.bps_per_bar, 1e4 * found.strategy.returns.mean())
    said = json.loads((first.path / "evaluation" / "test.json").read_text())
    assert {row["part"] for row in said["comparison"]} == {"train", "test"}
    page = (first.path / "report.html").read_text().partition('id="performance"')[0]
    for name in strategies:
        assert f'<th scope="row">{name}</th>' in page
        assert f"    {name:<17}" in printed
    assert examined(first).verdict == found.verdict
    for name in ("mean_stderr", "unseen_loss", "bars_needed", "too_short", "memorised", "enough", "cost_share"):
        said["verdict"].pop(name)
    del said["comparison"]  # as earlier versions wrote it
    (first.path / "evaluation" / "test.json").write_text(json.dumps(said))
    assert examined(first).comparison == ()
    assert {result.part for result in examine(first, "train").comparison} == {"train"}


def test_every_look_is_a_row_and_different_results_are_different_trials(here, first):
    again = examine(first)
    assert (again.verdict.n_trials, again.verdict.n_looks) == (1, 2)
    train_here("second", seed=1)
    report_run("first", "test")
    text = (first.path / "report.html").read_text()
    assert "2 different results in 3 looks" in text
    train_here("third", seed=2)
    third = RunFolder(here / "runs" / "third")
    found = assessments.load(third.path / "evaluation", "test")
    assert found.verdict.n_trials == 3
    assert found.overfitting is not None  # three results on the same bars can be compared


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_weights_are_what_another_backtester_can_follow_to_the_same_equity(kind, here, monkeypatch, capsys):
    """A band, a cap and costs that need no market impact; nothing but the exported file and the bars is read."""
    start(None, {"data": {"files": ["bars.csv"]}}, [*TINY, *NARROW, "data.costs.impact=0"], "capped", "quiet", False)
    file = here / f"w.{kind}"
    evaluate_run("capped", [], "test", file)
    assert "`fill_at`" in capsys.readouterr().out
    weights = pl.read_parquet(file) if kind == "parquet" else pl.read_csv(file, try_parse_dates=True)
    assert weights.columns == ["decided_at", "fill_at", "symbol", "weight"]
    table = pl.read_parquet(here / "runs/capped/evaluation/test.parquet")
    bars = load_bars(here / "bars.csv")
    frame = bars.frame.with_columns(pl.col("ts").cast(weights["fill_at"].dtype))
    found = replayed(weights, frame, *rates(bars, load_experiment("runs/capped/config.yaml").data.costs))
    assert_allclose(found, np.cumprod(1 + table["return"].to_numpy()), rtol=1e-9)
    assert (table["turnover"] > 0).sum() > 10
    decided = assessments.stamps_of(weights["decided_at"])
    at = int(np.searchsorted(bars.ts + bars.step, decided[0]))
    assert_array_equal(bars.ts[at : at + len(decided) // 2] + bars.step, decided[::2])


def test_an_evaluation_is_printed_for_programs_and_its_files_are_checked_first(tmp_path, first, capsys):
    evaluate_run("first", [], "test", None, as_json=True)
    said = json.loads(capsys.readouterr().out)
    assert said["verdict"]["n_trials"] == 1
    assert said["report"].endswith("report.html")
    with pytest.raises(ConfigError, match=r"\.parquet or a \.csv"):
        evaluate_run("first", [], "test", tmp_path / "w.xlsx")
    looks = len(ledger.read(first.path))
    with pytest.raises(ConfigError, match="there is no folder"):
        evaluate_run("first", [], "test", tmp_path / "nowhere" / "w.csv")
    assert len(ledger.read(first.path)) == looks


def test_one_bar_at_a_time_gives_the_decisions_of_the_backtest_bit_for_bit(here):
    """Shadow mode: features from the last few bars, the scaler of the training, the weight a broker reports."""
    tmp_path, folder = here, RunFolder(here / "runs" / "capped")
    start(None, {"data": {"files": ["bars.csv"]}}, [*TINY, *NARROW], "capped", "quiet", False)
    table = pl.read_parquet(folder.path / "evaluation/test.parquet")
    bars, data = load_bars(tmp_path / "bars.csv"), load_experiment(folder.config_file).data
    agent, features = DistributionalPPO.load(folder.last_checkpoint()), FeatureSet(data.features)
    _, scaler = remembered(folder.path)
    held = table.select("weight:AAA", "weight:BBB").to_numpy()
    first = int(np.searchsorted(bars.ts + bars.step, assessments.stamps_of(table["decided_at"])[0]))
    state, begin, decisions, raw = None, np.ones(1, dtype=bool), [], []
    for t in range(first - data.warm_up, first + len(held)):
        window = bars.slice(t - features.look_back, t + 1)  # all that is known at the close of bar t
        seen = scaler(features(window))[-1]
        seen = np.where(bars.tradable[t][:, None], seen, 0.0).reshape(-1)
        weight = held[t - first - 1] if t > first else np.zeros(2)
        observation = np.concatenate([seen, weight]).astype(np.float32)[None]
        action, state = agent.predict(observation, state=state, episode_start=begin, deterministic=True)
        begin = np.zeros(1, dtype=bool)
        if t >= first:
            raw.append(action[0])
            decisions.append(requested_weights(action, weight[None], limits_of(data.account))[0])
    assert np.abs(raw).sum(axis=1).max() > 0.008  # the cap binds
    assert 0.01 < np.mean(np.stack(decisions)[1:] == held[:-1]) < 0.99  # and so does the band
    assert_array_equal(np.stack(decisions), table.select("requested:AAA", "requested:BBB").to_numpy())


def test_other_bars_are_seen_with_the_scaler_of_the_training(tmp_path, first):
    folder = first
    write(tmp_path / "new.csv", 300, seed=9)
    found = examine(folder, files=["new.csv"])
    own = load_experiment(folder.config_file).data
    features = FeatureSet(own.features)
    _, scaler = remembered(folder.path)
    exam = exam_of(Experiment(load_experiment(folder.config_file)), folder.path, "test", ["new.csv"])
    bars = load_bars(tmp_path / "new.csv")
    assert_array_equal(exam.features(bars), scaler(features(bars)))
    refitted = FeatureScaler()
    refitted.fit(features(bars), slice(0, 300))
    assert refitted.state_dict() != scaler.state_dict()
    assert len(found.strategy) == 300 - 2 - features.look_back - own.warm_up
    assert found.subject.data == bars.digest()
    assert found.subject.split == "new-bars"
    with pytest.raises(DataError, match="needs the same ones"):
        examine(folder, files=[str(write(tmp_path / "other.csv", 300, ("AAA", "CCC")))])


def test_bars_that_the_agent_learned_from_are_no_new_bars_whatever_their_file_is_called(tmp_path, first):
    """A file that grew: what it held at the training is left out, and the report says so."""
    longer = random_bars(700, ("AAA", "BBB"), seed=0).frame
    later = random_bars(900, ("AAA", "BBB"), seed=5).frame.filter(pl.col("ts") > longer["ts"].max())
    pl.concat([longer, later]).write_csv(tmp_path / "grown.csv")
    data = Experiment(load_experiment(first.config_file)).task.dataset
    end = data.bars.ts[data.segment("train").stop]  # the last close that training saw
    found = examine(first, files=["grown.csv"])
    assert found.strategy.decided_at[0] > end
    assert found.strategy.fill_at[-1] > longer["ts"].max().replace(tzinfo=None)
    assert "Bars that the agent learned from" in dict(found.subject.facts)
    assert len(found.strategy) == 900 - 2 - int(np.searchsorted(data.bars.ts, end)) - 1
    longer.filter(pl.col("ts").dt.replace_time_zone(None) <= end).write_csv(tmp_path / "old.csv")
    with pytest.raises(DataError, match="none is later than its training"):
        examine(first, files=["old.csv"])
    write(tmp_path / "other.csv", 300, seed=9)  # the same time and names, another market
    assert "Bars that the agent learned from" not in dict(examine(first, files=["other.csv"]).subject.facts)


def test_symbols_in_another_order_are_the_same_symbols(tmp_path, first):
    folder = first
    frame = random_bars(300, ("AAA", "BBB"), seed=9).frame
    frame.write_csv(tmp_path / "one.csv")
    frame.sort("ts", "symbol", descending=[False, True]).write_csv(tmp_path / "two.csv")
    assert load_bars(tmp_path / "two.csv").symbols == ("BBB", "AAA")
    one, two = (examine(folder, files=[name]) for name in ("one.csv", "two.csv"))
    assert_array_equal(one.strategy.returns, two.strategy.returns)


def test_what_was_chosen_from_the_data_is_said(tmp_path):
    write(tmp_path / "bars.csv", symbols=("AAA",))
    lines: list[str] = []
    introduce(Experiment(experiment_config({"data": {"files": [str(tmp_path / "bars.csv")]}})), lines.append)
    said = "\n".join(lines)
    assert "bars per year" in said
    assert "costs: fee 2, half spread 1, slippage 1 bps" in said
    assert "data.validation = 0: 700 bars are few" in said
    assert "splits: train" in said


def test_bars_that_load_but_look_wrong_are_pointed_out(tmp_path):
    """Stamps that end in 59.999 seconds are closes, whatever the file calls them."""
    frame = random_bars(700, ("AAA",)).frame.with_columns(pl.col("ts") + pl.duration(milliseconds=3_599_999))
    frame.write_parquet(tmp_path / "closes.parquet")
    lines: list[str] = []
    introduce(Experiment(experiment_config({"data": {"files": [str(tmp_path / "closes.parquet")]}})), lines.append)
    assert any("looks wrong: close_stamps" in line for line in lines)
    lines.clear()
    given = {"data": {"files": [str(tmp_path / "closes.parquet")], "stamp": "close"}}
    introduce(Experiment(experiment_config(given)), lines.append)
    assert not any("looks wrong" in line for line in lines)


def test_a_configuration_of_own_bars_survives_its_yaml_and_keeps_what_the_user_says(tmp_path):
    write(tmp_path / "bars.csv")
    given = {"data": {"files": [str(tmp_path / "bars.csv")], "costs": {"fee_bps": 7.0}}}
    config = experiment_config(given, ["data.validation=0.1"])
    assert config.data is not None
    assert (config.data.costs.fee_bps, config.data.costs.half_spread_bps, config.data.validation) == (7.0, 1.0, 0.1)
    assert config.steps == 200_000
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    assert load_experiment(tmp_path / "c.yaml") == config


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": "bars.csv"}, "expected settings"),
        ({"data": {"files": ["none.csv"]}}, "There is no file"),
        ({"data": {"files": []}}, "files is empty"),
        ({"data": {"files": ["none.csv"], "fees": 3}}, "has no setting 'fees'"),
    ],
)
def test_bad_data_settings_say_what_to_do(settings, message):
    with pytest.raises((ConfigError, DataError), match=message):
        experiment_config(settings)


def test_bars_that_were_learned_from_are_never_evidence(first):
    found = examine(first, "train")
    assert not found.verdict.skill
    assert found.verdict.reasons == ("In sample: the agent has learned from these very bars.",)
    text = (first.path / "report-train.html").read_text()
    assert "IN SAMPLE" in text
    assert "out of sample and net" not in text
    report_run("first", "train")
    assert (first.path / "report-train.html").read_text() == text


def test_train_and_other_bars_have_reports_of_their_own_and_the_command_says_which(tmp_path, first, capsys):
    """None of them overwrites the report of test, nor that of other new bars."""
    kept = (first.path / "report.html").read_bytes()
    write(tmp_path / "one.csv", 300, seed=9)
    write(tmp_path / "two.csv", 300, seed=8)
    names = [f"new-bars-{load_bars(tmp_path / file).digest()[:8]}" for file in ("one.csv", "two.csv")]
    looks = [("train", []), ("test", [tmp_path / "one.csv"]), ("test", [tmp_path / "two.csv"])]
    for (split, files), name in zip(looks, ["train", *names], strict=True):
        evaluate_run("first", files, split, None)
        assert f"report in runs/first/report-{name}.html" in capsys.readouterr().out
        assert (files[0].name if files else "IN SAMPLE") in (first.path / f"report-{name}.html").read_text()
    assert (first.path / "report.html").read_bytes() == kept
    assert {file.stem for file in (first.path / "evaluation").glob("*.json")} == {"test", "train", *names}
    evaluate_run("first", [tmp_path / "one.csv"], "test", None, as_json=True)
    assert json.loads(capsys.readouterr().out)["report"].endswith(f"report-{names[0]}.html")
    report_run("first", None)
    assert "report in runs/first/report.html" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=names[1]):
        report_run("first", "new-bars")  # which of the two?
    report_run("first", names[1])
    assert names[1] in capsys.readouterr().out
    with pytest.raises(ConfigError, match="both given"):
        evaluate_run("first", [tmp_path / "one.csv"], "train", None)


def test_a_run_without_a_report_is_resumed_without_a_look_at_test(here, capsys):
    """The trials of test deflate what is claimed, so whoever asked for no look gets none."""
    start(None, {"data": {"files": ["bars.csv"]}}, TINY, "blind", "live", False, report=False)
    folder = RunFolder(here / "runs" / "blind")
    manifest = json.loads(folder.manifest_file.read_text())
    for said in (
        manifest,
        {"command": ["tailguard", "train", "--no-report"]},
    ):  # the second as earlier versions wrote it
        folder.manifest_file.write_text(json.dumps(said))
        capsys.readouterr()
        go_on("blind", "live")
        assert "test has not been looked at" in capsys.readouterr().out
        assert not (folder.path / ledger.FILE).exists()
        assert not (folder.path / "report.html").exists()
    folder.manifest_file.write_text(json.dumps({**manifest, "report": None}))
    go_on("blind", "quiet")
    assert len(ledger.read(folder.path)) == 1


def test_a_part_that_is_not_there_and_a_task_without_bars_are_refused(tmp_path, first):
    folder = first
    with pytest.raises(ConfigError, match="no validation part"):
        examine(folder, "validation")
    with pytest.raises(ConfigError, match="Did you mean"):
        report_run("first", "tests")
    gym = Experiment(experiment_config({"gym_env": "CartPole-v1"}))
    with pytest.raises(ConfigError, match="trained on bars"):
        exam_of(gym, tmp_path)


def test_an_embedded_market_is_examined_on_a_draw_that_no_training_uses():
    task = PresetTask(preset("signal"))
    exam = preset_exam(task, seed=3)
    assert not np.array_equal(exam.env.bars.close[:1_000], task.preset.market.bars(1_000, 3).close)
    best = replace(exam, stop=exam.start + 2_000).run(exam.best_policy)
    assert best.returns.mean() > 0
    assert isinstance(Experiment(experiment_config({"preset": "signal"})).task, PresetTask)
    assert not isinstance(task, DataTask)


def test_a_cvar_limit_is_a_promise_that_the_report_judges(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "bars.csv")
    risk = ["ppo.risk.mode=episode", "ppo.risk.cvar_limit=-0.05", "data.episode_length=40"]
    seen = ["data.agent_state=[weight, time_left, period_return]"]
    start(None, {"data": {"files": ["bars.csv"]}}, [*TINY, *risk, *seen], "careful", "quiet", False)
    folder = RunFolder(tmp_path / "runs/careful")
    text = (folder.path / "report.html").read_text()
    assert "CVaR 5% of the return of 40 bars: the limit is -5.00%" in text
    assert len(assessments.load(folder.path / "evaluation", "test").strategy) % 40 == 0  # whole periods


def test_periods_restart_what_an_agent_sees_of_time_and_one_account_follows(tmp_path):
    """A policy that goes long only while less than half of its period is left."""
    exam = preset_exam(PresetTask(preset("signal")), seed=0)
    config = exam.env.config.replace(agent_state=("weight", "time_left"), episode_length=40)
    env = TradingVecEnv(exam.env.bars, exam.features(exam.env.bars), exam.env.feature_names, look_back=1, config=config)
    found = backtest_periods(env, lambda seen: (seen[:, -1:] <= 0.5).astype(float), 100, 290, 40)
    assert len(found) == 160
    expected = np.tile(np.repeat([0.0, 1.0], 20), 4)
    assert_array_equal(found.targets[:, 0], expected)
    assert_array_equal(
        found.returns,
        follow_targets(env.bars, expected[:, None], 100, costs=config.costs, account=config.account).returns,
    )
    whole = backtest(env, lambda seen: (seen[:, -1:] <= 0.5).astype(float), 100, 260)
    assert not np.array_equal(whole.targets, found.targets)
