from __future__ import annotations

from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from market_data import random_bars
from numpy.testing import assert_allclose, assert_array_equal

from tailguard.errors import ConfigError, DataError, StateError
from tailguard.market import Bars
from tailguard.market.features import FEATURES, FeatureScaler, FeatureSet, feature

by_name = pytest.mark.parametrize("item", FEATURES, ids=attrgetter("name"))


def with_another_future(bars: Bars, t: int, seed: int = 1) -> Bars:
    """Bars that agree up to bar t and have nothing in common after it, not even which bars are missing."""
    other = random_bars(len(bars), bars.symbols, seed=seed, missing=0.5)
    past = np.arange(len(bars))[:, None] <= t

    def join(name: str) -> np.ndarray:
        return np.where(past, getattr(bars, name), getattr(other, name))

    return Bars.from_arrays(bars.ts, bars.symbols, *map(join, ("open", "high", "low", "close", "volume", "tradable")))


@by_name
def test_rewriting_the_future_leaves_the_past_bit_identical(item):
    bars = random_bars(300, ("A", "B"), missing=0.1)
    t = len(bars) // 2
    for rewritten in (bars.scale_after(t, factor=3.0), with_another_future(bars, t), bars.slice(0, t + 1)):
        assert_array_equal(item(bars)[: t + 1], item(rewritten)[: t + 1])  # no tolerance


@by_name
def test_a_value_depends_on_its_look_back_and_on_nothing_before(item):
    bars = random_bars(300)
    start = 120
    late = item(bars.slice(start, 300))
    assert_array_equal(late[item.look_back :], item(bars)[start + item.look_back :])  # no tolerance
    assert np.isnan(late[: item.look_back]).all()


@by_name
def test_the_declared_look_back_is_not_longer_than_needed(item):
    if item.look_back == 0:
        return
    bars = random_bars(300)
    t, first = 200, 200 - item.look_back
    nudged = bars.close.copy()
    nudged[first] = bars.high[first] * 1.5
    low, high, volume = bars.low.copy(), bars.high.copy(), bars.volume.copy()
    low[first], high[first], volume[first] = low[first] * 0.5, high[first] * 2.0, volume[first] * 9  # still valid
    other = Bars.from_arrays(bars.ts, bars.symbols, bars.open, high, low, nudged, volume)
    assert item(bars)[t] != item(other)[t]


@by_name
def test_no_nan_after_the_look_back_of_a_symbols_own_bars(item):
    bars = random_bars(400, ("A", "B"), missing=0.3)
    enough = np.cumsum(bars.tradable, axis=0) > item.look_back
    assert np.isfinite(item(bars)[enough]).all()


@by_name
def test_a_dead_market_gives_finite_features(item):
    ones = np.ones(200)
    bars = Bars.from_arrays(random_bars(200).ts, ["A"], ones, ones, ones, ones, np.zeros(200))
    assert np.isfinite(item(bars)[item.look_back :]).all()


@by_name
def test_symbols_together_equal_symbols_alone(item):
    both = random_bars(200, ("A", "B"), missing=0.2)
    for a in range(2):
        here = both.tradable[:, a]
        alone = Bars.from_arrays(
            both.ts[here],
            [both.symbols[a]],
            *(panel[here, a] for panel in (both.open, both.high, both.low, both.close, both.volume)),
        )
        assert_array_equal(item(both)[here, a], item(alone)[:, 0])


def test_a_missing_bar_keeps_the_last_value():
    bars = random_bars(100, ("A", "B"), missing=0.3)
    values = feature("return_1")(bars)
    for before, a in np.argwhere(~bars.tradable[1:]):
        assert_array_equal(values[before + 1, a], values[before, a])


def test_features_of_a_constant_growth_are_known():
    growth = 0.002
    close = np.exp(growth * np.arange(200))
    bars = Bars.from_arrays(random_bars(200).ts, ["A"], close, close, close, close, np.ones(200))
    expected = {"return_1": growth, "return_16": 16 * growth, "volatility_16": 0.0, "rsi_14": 1.0, "body": 0.0}
    # 32 equally spaced points: the last is 15.5 steps above the mean, their deviation is sqrt((32^2 - 1) / 12) steps.
    expected |= {"zscore_32": 15.5 / np.sqrt((32**2 - 1) / 12), "range_position_32": 1.0, "volume_ratio_32": 0.0}
    expected |= {"atr_14": np.mean(np.exp(-growth * np.arange(14)) * (1 - np.exp(-growth)))}
    for name, value in expected.items():
        assert_allclose(feature(name)(bars)[100:], value, atol=1e-12, err_msg=name)


def test_rsi_is_gains_against_losses():
    bars = random_bars(100)
    moves = np.diff(np.log(bars.close[:, 0]))[-14:]
    gains, losses = moves[moves > 0].sum(), -moves[moves < 0].sum()
    assert_allclose(feature("rsi_14")(bars)[-1, 0], (gains - losses) / (gains + losses), rtol=1e-12)


def test_the_clock_starts_days_at_midnight_and_weeks_on_monday():
    bars = random_bars(200)  # hourly from Monday, 00:00
    assert_allclose(feature("day_sin")(bars)[[0, 6, 12, 24], 0], [0, 1, 0, 0], atol=1e-12)
    assert_allclose(feature("week_cos")(bars)[[0, 84, 168], 0], [1, -1, 1], atol=1e-12)


def test_a_feature_set_stacks_its_features_in_order():
    bars = random_bars(120, ("A", "B"))
    chosen = FeatureSet(["rsi_14", "return_5", "body"])
    values = chosen(bars)
    assert values.shape == (120, 2, 3)
    assert values.dtype == np.float32
    assert (chosen.names, chosen.look_back) == (("rsi_14", "return_5", "body"), 14)
    assert_array_equal(values[:, :, 1], feature("return_5")(bars).astype(np.float32))


def test_unknown_and_repeated_features_are_refused():
    with pytest.raises(ConfigError, match='Did you mean "rsi_16"'):
        feature("rso_16")
    with pytest.raises(ConfigError, match="There is no feature 'zscore_1'"):
        feature("zscore_1")
    with pytest.raises(ConfigError, match="each once"):
        FeatureSet(["body", "body"])


def test_the_scaler_sees_only_train_rows():
    bars = random_bars(300, ("A", "B"), missing=0.1)
    features, train = FeatureSet(), slice(64, 150)
    scalers = []
    for market in (bars, with_another_future(bars, 149)):
        scaler = FeatureScaler()
        scaler.fit(features(market), train)
        scalers.append(scaler.state_dict())
    assert scalers[0] == scalers[1]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000), scale=st.floats(1e-3, 1e3), shift=st.floats(-1e3, 1e3))
def test_scaled_train_rows_have_mean_zero_and_deviation_one(seed, scale, shift):
    values = np.random.default_rng(seed).normal(size=(400, 2, 3)) * scale + shift
    scaler = FeatureScaler(clip=100.0)
    scaler.fit(values, slice(0, 300))
    scaled = scaler(values)[:300].reshape(-1, 3)
    assert_allclose(scaled.mean(axis=0), 0.0, atol=1e-4)
    assert_allclose(scaled.std(axis=0), 1.0, atol=1e-4)


def test_the_scaler_clips_and_makes_nan_and_constants_neutral():
    values = np.random.default_rng(0).normal(size=(100, 1, 3))
    values[:, :, 1] = 4.0
    values[0, 0, 2] = np.nan
    values[99, 0, 0] = 1e9
    scaler = FeatureScaler(clip=5.0)
    scaler.fit(values, slice(0, 90))
    scaled = scaler(values)
    assert scaled[99, 0, 0] == 5.0
    assert (scaled[:, :, 1] == 0).all()
    assert scaled[0, 0, 2] == 0
    assert np.isfinite(scaled).all()


def test_a_loaded_scaler_scales_the_same():
    values = np.random.default_rng(0).normal(size=(100, 1, 3))
    scaler, twin = FeatureScaler(), FeatureScaler()
    scaler.fit(values, slice(0, 90))
    twin.load_state_dict(scaler.state_dict())
    assert_array_equal(scaler(values), twin(values))
    with pytest.raises(StateError, match="missing"):
        twin.load_state_dict({"mean": [0.0]})
    with pytest.raises(StateError, match="cannot load 1 means"):
        twin.load_state_dict({"mean": [0.0], "std": [1.0]})


def test_the_scaler_refuses_what_it_cannot_fit():
    with pytest.raises(DataError, match="shorter than its look-back"):
        FeatureScaler().fit(np.full((10, 1, 2), np.nan), slice(0, 5))
    with pytest.raises(DataError, match="Call fit first"):
        FeatureScaler()(np.zeros((10, 1, 2)))
