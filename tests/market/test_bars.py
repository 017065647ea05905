from __future__ import annotations

import copy
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from market_data import HOUR, MINUTE, frame, random_bars
from numpy.testing import assert_array_equal

from tailguard.errors import DataError
from tailguard.market import Bars, load_bars


def from_stamps(ts: np.ndarray) -> Bars:
    ones = np.ones(len(ts))
    return Bars.from_arrays(ts, ["A"], ones, ones, ones, ones, ones)


def test_bars_cannot_change():
    bars = random_bars()
    with pytest.raises(AttributeError, match="cannot change"):
        bars.step = MINUTE  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        bars.close[0, 0] = 1.0


def traveller() -> Bars:
    return load_bars(frame(30).with_columns(venue=pl.lit("X"), funding=pl.lit(0.5)))


def what_arrived(bars: Bars) -> tuple[object, ...]:
    return bars.digest(), bars.step, bars.notes, bars.frame.equals(traveller().frame), bars.close.flags.writeable


def test_bars_travel_to_worker_processes_unchanged():
    bars = traveller()
    with ProcessPoolExecutor(1, get_context("spawn")) as worker:
        arrived = worker.submit(what_arrived, bars).result()
    for found in (arrived, what_arrived(copy.deepcopy(bars))):
        assert found == (bars.digest(), bars.step, bars.notes, True, False)


def test_changing_the_frame_taken_does_not_change_the_bars():
    bars = random_bars(10)
    bars.frame.insert_column(0, pl.Series("x", range(10)))
    assert "x" not in bars.frame.columns


def test_changing_the_arrays_given_does_not_change_the_bars():
    source = random_bars()
    close = source.close.copy()
    bars = Bars.from_arrays(source.ts, source.symbols, source.open, source.high, source.low, close, source.volume)
    close[:] = 7.0
    assert_array_equal(bars.close, source.close)


def test_panels_are_contiguous_and_a_missing_bar_is_a_missing_row():
    bars = random_bars(200, ("A", "B", "C"), missing=0.2)
    for panel in (bars.open, bars.high, bars.low, bars.close, bars.volume):
        assert panel.flags.c_contiguous
        assert panel.shape == (200, 3)
        assert panel.dtype == np.float64
    assert bars.frame.height == bars.tradable.sum() < 600
    assert_array_equal(np.isnan(bars.close), ~bars.tradable)
    assert (bars.volume[~bars.tradable] == 0).all()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(2, 60), a=st.integers(1, 4), missing=st.floats(0, 0.6))
def test_a_frame_and_its_panel_are_the_same_bars(seed, n, a, missing):
    bars = random_bars(n, tuple("ABCD"[:a]), seed=seed, missing=missing)
    assert Bars(bars.frame).digest() == bars.digest()
    assert Bars(bars.frame.sort("symbol", "ts")).digest() == bars.digest()  # symbol by symbol is an order too


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), cut=st.integers(1, 49))
def test_a_slice_is_the_rows_it_names(seed, cut):
    bars = random_bars(50, ("A", "B"), seed=seed, missing=0.3)
    head, tail = bars.slice(0, cut), bars.slice(cut, 50)
    assert_array_equal(np.concatenate([head.close, tail.close]), bars.close)
    assert pl.concat([head.frame, tail.frame]).equals(bars.frame)
    assert (tail.step, tail.bars_per_year) == (bars.step, bars.bars_per_year)


def test_rewriting_the_future_keeps_the_past():
    bars = random_bars(100)
    rewritten = bars.scale_after(40, 3.0)
    assert_array_equal(rewritten.close[:41], bars.close[:41])
    assert_array_equal(rewritten.close[41:], 3.0 * bars.close[41:])
    assert rewritten.digest() != bars.digest()


def test_extras_are_kept_as_panels_and_columns():
    source = frame(20).with_columns(funding=pl.lit(0.5), venue=pl.lit("X"))
    bars = Bars(source)
    assert_array_equal(bars.extras["funding"], np.full((20, 1), 0.5))
    assert bars.frame["venue"].to_list() == ["X"] * 20


def test_bars_per_year_counts_what_is_there():
    start = np.datetime64("2024-01-01T00:00", "ms")  # a Monday
    always = start + HOUR * np.arange(24 * 365)
    assert from_stamps(always).bars_per_year == pytest.approx(24 * 365.25)
    days = start.astype("datetime64[D]") + np.arange(3 * 365)
    weekdays = days[np.is_busday(days)].astype("datetime64[ms]")
    assert from_stamps(weekdays).bars_per_year == pytest.approx(365.25 * 5 / 7)
    assert from_stamps(weekdays[:9]).bars_per_year == pytest.approx(365.25 * 5 / 7)  # cut in mid-week
    sessions = (weekdays[:50, None] + HOUR * (9 + np.arange(7))).ravel()
    assert from_stamps(sessions).bars_per_year == pytest.approx(365.25 * 5 / 7 * 7)
    assert from_stamps(sessions).step == HOUR


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("close", np.nan, "not a finite number"),
        ("high", np.inf, "not a finite number"),
        ("low", 0.0, "not positive"),
        ("high", 1.0, "high is below low"),
        ("open", 1e6, "open is outside"),
        ("close", 1e6, "close is outside"),
        ("volume", -1.0, "volume is negative"),
        ("close", None, "empty price"),
    ],
)
def test_a_number_that_cannot_be_is_named_with_its_place(column, value, message):
    broken = frame(10).with_columns(
        pl.when(pl.int_range(pl.len()) == 7).then(pl.lit(value, dtype=pl.Float64)).otherwise(column).alias(column)
    )
    with pytest.raises(DataError, match=rf"(Bar|Row) 7.*{message}"):
        Bars(broken)


def test_order_and_repeats_are_refused():
    good = frame(10)
    with pytest.raises(DataError, match=r"Row 1: .* is earlier .*repair=\['sort'\]"):
        Bars(good.reverse())
    with pytest.raises(DataError, match=r"Row 10: .* repeats the stamp"):
        Bars(pl.concat([good, good.tail(1)]))


def test_a_naive_or_short_frame_is_refused():
    with pytest.raises(DataError, match="does not say which time zone"):
        Bars(frame(10).with_columns(pl.col("ts").dt.replace_time_zone(None)))
    with pytest.raises(DataError, match="One bar does not say"):
        Bars(frame(10).head(1))
    with pytest.raises(DataError, match="no row"):
        Bars(frame(10).clear())
    with pytest.raises(DataError, match=r"lacks \['close'\]"):
        Bars(frame(10).drop("close"))


def test_arrays_of_the_wrong_shape_are_refused():
    bars = random_bars(10)
    with pytest.raises(DataError, match=r"close has shape \(9, 1\)"):
        Bars.from_arrays(bars.ts, ["A"], bars.open, bars.high, bars.low, bars.close[:9], bars.volume)
    with pytest.raises(DataError, match="Stamps must rise"):
        Bars.from_arrays(bars.ts[::-1], ["A"], bars.open, bars.high, bars.low, bars.close, bars.volume)
    with pytest.raises(DataError, match="its own name"):
        Bars.from_arrays(bars.ts, ["A", "A"], *[np.ones((10, 2))] * 5)
