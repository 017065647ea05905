"""Runs from Python: what they are trained on, and that they are those of the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from typer.testing import CliRunner

import tailguard as tg
from tailguard.cli import app
from tailguard.errors import ConfigError, DataError
from tailguard.market.oracles import oracle_market
from tailguard.run import RunFolder
from tests.runs import whole_state

SETTINGS = {
    "n_envs": 4,
    "ppo.n_steps": 32,
    "ppo.sequence_length": 8,
    "ppo.n_epochs": 1,
    "policy_kwargs.lstm_hidden_size": 8,
}


def bars(market: str = "regime", n: int = 2_500) -> pl.DataFrame:
    return oracle_market(market).bars(n, seed=0).frame


def small(data: Any, **options: Any) -> tg.Run:
    return tg.train(data, steps=128, settings=SETTINGS, quiet=True, **options)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def as_pandas(frame: pl.DataFrame) -> pd.DataFrame:
    stamps = pd.DatetimeIndex(frame["ts"].dt.replace_time_zone(None).to_numpy(), name="Date")
    names = ("open", "high", "low", "close", "volume")
    return pd.DataFrame({name.title(): frame[name].to_list() for name in names}, index=stamps)


def test_python_and_the_command_line_train_the_same_agent() -> None:
    bars().write_parquet("bars.parquet")
    run = small("bars.parquet", run="python", seed=3)
    words = [f"--set={name}={value}" for name, value in SETTINGS.items()]
    said = CliRunner().invoke(
        app, ["train", "--data", "bars.parquet", "--steps", "128", "--seed", "3", "--run", "shell", *words]
    )
    assert said.exit_code == 0, said.output
    shell = RunFolder("runs/shell")
    assert whole_state(run.folder.last_checkpoint()) == whole_state(shell.last_checkpoint())
    table = tg.compare([run, "shell"])
    assert table["run"].to_list() == ["python", "shell"]
    assert table["sharpe"][0] == table["sharpe"][1]
    np.testing.assert_allclose(table["total_return"][0], np.prod(1 + run.last_assessment().strategy.returns) - 1)  # type: ignore[union-attr]


def test_frames_give_the_same_run_as_their_file() -> None:
    naive = bars().with_columns(pl.col("ts").dt.replace_time_zone(None))
    naive.drop("symbol").write_csv("bars.csv")
    file = small("bars.csv", tz="UTC", symbol="AAA", run="file")
    for name, frame in {"polars": naive.drop("symbol"), "pandas": as_pandas(naive)}.items():
        run = small(frame, tz="UTC", symbol="AAA", run=name)
        assert run.path == Path("runs") / name
        assert whole_state(run.folder.last_checkpoint()) == whole_state(file.folder.last_checkpoint())
        np.testing.assert_array_equal(run.weights()["weight"], file.weights()["weight"])


def test_a_run_answers_what_is_asked_of_it() -> None:
    run = small(bars(), run="first")
    assert run.report().read_text().lstrip().lower().startswith("<!doctype html")
    weights = run.weights()
    assert weights.columns == ["decided_at", "fill_at", "symbol", "weight"]
    shown = run._repr_html_()
    assert run.last_assessment().verdict.headline in shown  # type: ignore[union-attr]
    assert shown.count("<polyline") == 2
    assert not re.search(r"<script|https?:", shown)
    later = oracle_market("regime").bars(1_500, seed=7)
    found = run.evaluate(later.frame)
    assert found.subject.split == "new-bars"
    assert len(found.strategy) > 1_000
    assert (run.export("frozen") / "weights.safetensors").is_file()
    assert run.resume(steps=256, quiet=True).folder.steps()[-1] == 256
    again = tg.open_run("first")
    assert repr(again).startswith("Run('first', 256 steps, ")
    assert again.evaluate(split="train").subject.in_sample


def test_new_bars_are_read_as_they_are_and_not_as_those_of_the_training() -> None:
    bars().with_columns(pl.col("ts").dt.replace_time_zone(None)).write_parquet("naive.parquet")
    run = small("naive.parquet", tz="UTC", run="naive", report=False)
    later = oracle_market("regime").bars(1_500, seed=7).frame
    plain = later.with_columns(pl.col("ts").dt.replace_time_zone(None))
    later.write_parquet("later.parquet")
    expected = run.evaluate(later).strategy.returns
    for given in (plain, as_pandas(later), as_pandas(later).tz_localize("UTC")):
        np.testing.assert_array_equal(run.evaluate(given).strategy.returns, expected)
    np.testing.assert_array_equal(run.evaluate("later.parquet", tz=None).strategy.returns, expected)
    with pytest.raises(DataError, match="tz='UTC'"):
        small(bars(), run="aware", report=False).evaluate(plain)
    np.testing.assert_array_equal(len(tg.open_run("aware").evaluate(plain, tz="UTC").strategy), len(expected))


def test_a_frame_per_symbol_is_one_portfolio() -> None:
    pairs = bars("pairs")
    names = pairs["symbol"].unique(maintain_order=True).to_list()
    run = small({name: pairs.filter(pl.col("symbol") == name).drop("symbol") for name in names}, report=False)
    assert run.folder.manifest()["data"]["bars"] == oracle_market("pairs").bars(2_500, seed=0).digest()
    assert "not examined" in repr(run)
    assert "not examined" in run._repr_html_()


def test_an_embedded_market_is_named() -> None:
    assert small("regime", run="market").folder.steps() == [128]


def test_what_cannot_be_meant_is_refused_and_leaves_nothing() -> None:
    with pytest.raises(DataError, match="tz='UTC'"):
        small(bars().with_columns(pl.col("ts").dt.replace_time_zone(None)), run="naive")
    with pytest.raises(ConfigError, match=r"Did you mean 'ppo\.gamma'"):
        tg.train(bars(), settings={"gamma": 0.9}, run="odd")
    assert not (Path("runs") / "odd" / "bars.parquet").exists()
    with pytest.raises(ConfigError, match="no run"):
        tg.compare([])
    with pytest.raises(ConfigError, match="is not a run"):
        tg.open_run("nowhere")
    small(bars(), run="taken", report=False)
    before = (Path("runs") / "taken" / "bars.parquet").read_bytes()
    with pytest.raises(ConfigError, match="already holds a run"):
        small(bars(n=3_000), run="taken")
    assert (Path("runs") / "taken" / "bars.parquet").read_bytes() == before
