"""A user's own bars as environments: no sight of the future from file to observation, scalers of train only."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tailguard.env import Costs
from tailguard.env.dataset import DataConfig, Dataset, data_defaults, nested_defaults, read_bars
from tailguard.errors import ConfigError, DataError
from tailguard.evaluation import backtest
from tailguard.market import Bars
from tests.agents import tiny_agent
from tests.market.market_data import random_bars

CONFIG = DataConfig(files=("nowhere.csv",), warm_up=16, episode_length=60)


def dataset(n: int = 1_200, symbols: tuple[str, ...] = ("AAA", "BBB"), missing: float = 0.05, **changes) -> Dataset:
    return Dataset.of(CONFIG.replace(**changes), random_bars(n, symbols, missing=missing))


@pytest.mark.parametrize("part", ["train", "test"])
def test_rewriting_the_future_changes_nothing_an_agent_saw_or_earned_before(part):
    """From bars through features, scaler, environment and account: bit for bit, for an agent that acts on all of it."""
    data = dataset()
    segment = data.segment(part)
    cut = (segment.start + segment.stop) // 2
    other = Dataset.of(data.config, data.bars.scale_after(cut, 3.0))
    if part == "test":  # the scaler has seen train only, so the whole observation is untouched
        assert data.scaler.state_dict() == other.scaler.state_dict()
    else:  # train itself is rewritten: what is scaled with it may move, what is seen of it may not
        other = Dataset.of(data.config, other.bars, data.scaler)
    assert_array_equal(data.features[: cut + 1], other.features[: cut + 1])
    agent = tiny_agent(data.training_env(4, seed=0))
    seen, again = (
        backtest(env, agent, segment.start, segment.stop, warm_up=16 if part == "test" else 0)
        for env in (data.exam_env(), other.exam_env())
    )
    n = cut - segment.start  # decisions at bars start .. cut - 1 are filled and earned by bar cut
    assert_array_equal(seen.targets[: n + 1], again.targets[: n + 1])
    assert_array_equal(seen.returns[:n], again.returns[:n])
    assert not np.array_equal(seen.returns, again.returns)


def test_the_scaler_is_fitted_on_train_alone():
    data = dataset(missing=0.0)
    train = data.features[data.split.train.rows].reshape(-1, len(CONFIG.features))
    moving = train.std(axis=0) > 0
    inside = np.abs(train).max(axis=0) < CONFIG.feature_clip  # features that are never cut have their exact moments
    assert (moving & inside).sum() >= 5
    assert_allclose(train[:, moving & inside].mean(axis=0), 0.0, atol=1e-5)
    assert_allclose(train[:, moving & inside].std(axis=0), 1.0, atol=1e-4)
    later = data.bars.scale_after(data.split.train.reward_stop, 7.0)
    assert Dataset.of(CONFIG, later).scaler.state_dict() == data.scaler.state_dict()


def test_no_training_episode_leaves_train():
    data = dataset()
    env = data.training_env(8, seed=3)
    env.reset()
    lowest, highest = len(data.bars), 0
    for _ in range(400):
        env.step(np.zeros((8, 2)))
        lowest, highest = min(lowest, int(env.t.min())), max(highest, int(env.t.max()))
    assert lowest >= data.split.train.start
    assert highest <= data.split.train.stop  # the close at which the last reward of train is earned


def test_the_observation_is_the_scaled_features_and_the_weight():
    data = dataset()
    env = data.exam_env()
    names = [f"{name}:{symbol}" for symbol in ("AAA", "BBB") for name in CONFIG.features]
    assert env.layout.names == (*names, "weight:AAA", "weight:BBB")
    t = int(env.t[0])
    shown = np.where(data.bars.tradable[t][:, None], data.features[t], 0.0)
    assert_array_equal(env.observe()[0, :-2], shown.reshape(-1))


def test_bars_of_another_file_are_all_test_and_seen_with_the_training_scaler():
    data = dataset()
    fresh = random_bars(500, ("AAA", "BBB"), seed=5)
    other = Dataset.unseen(data.config, fresh, data.scaler)
    test = other.segment("test")
    assert (test.start, test.stop) == (64 + 16, 500 - 2)
    assert other.scaler is data.scaler
    with pytest.raises(ConfigError, match="no validation part"):
        other.segment("validation")
    with pytest.raises(DataError, match="first decision is at bar 80"):
        Dataset.unseen(data.config, fresh.slice(0, 80), data.scaler)


def test_defaults_that_depend_on_the_data_say_why():
    bars = random_bars(600, ("AAA",))
    quiet = Bars.from_arrays(bars.ts, ["AAA"], bars.open, bars.high, bars.low, bars.close, np.zeros_like(bars.close))
    chosen = data_defaults(quiet, {"files": ["x.csv"]})
    settings = nested_defaults(chosen)
    assert settings["costs"] == {"impact": 0.0}
    assert settings["validation"] == 0.0
    config = DataConfig(files=("x.csv",), **{**settings, "costs": Costs(**settings["costs"])})
    data = Dataset.of(config, quiet)
    assert 0 <= len(data.split.train) - 2 * settings["episode_length"] <= 1  # two episodes, and no longer ones, fit
    assert data.training_env(2, 0).length == settings["episode_length"]
    assert all(default.reason for default in chosen)
    assert data_defaults(random_bars(4_000), {"files": ["x.csv"]}) == ()


def test_files_are_read_and_joined(tmp_path):
    for symbol in ("AAA", "BBB"):
        random_bars(300, (symbol,)).frame.write_parquet(tmp_path / f"{symbol}.parquet")
    bars = read_bars(DataConfig(files=tuple(str(tmp_path / f"{symbol}.parquet") for symbol in ("AAA", "BBB"))))
    assert bars.symbols == ("AAA", "BBB")
    with pytest.raises(DataError, match="There is no file"):
        read_bars(DataConfig(files=(str(tmp_path / "none.csv"),)))
    frame = pl.read_parquet(tmp_path / "AAA.parquet").with_columns(pl.col("ts").dt.strftime("%Y-%m-%d %H:%M"))
    frame.write_csv(tmp_path / "naive.csv")
    with pytest.raises(DataError, match="time zone"):
        read_bars(DataConfig(files=(str(tmp_path / "naive.csv"),)))
    assert len(read_bars(DataConfig(files=(str(tmp_path / "naive.csv"),), tz="UTC"))) == 300
