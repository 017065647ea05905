from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
from market_data import HOUR, MINUTE, SHARED, frame, random_bars

from tailguard.errors import DataError
from tailguard.market import Bars, load_bars
from tailguard.market.check import check_file

COLUMNS = ["ts", "open", "high", "low", "close", "volume"]


def write_csv(path: Path, source: pl.DataFrame, *, stamps: str = "%Y-%m-%dT%H:%M:%SZ", **options: object) -> Path:
    source.with_columns(pl.col("ts").dt.strftime(stamps)).write_csv(path, **options)  # type: ignore[arg-type]
    return path


def as_pandas(source: pl.DataFrame) -> pd.DataFrame:
    stamps = pd.DatetimeIndex(source["ts"].dt.replace_time_zone(None).to_numpy(), tz="UTC")
    return pd.DataFrame({"ts": stamps, **{name: source[name].to_list() for name in source.columns if name != "ts"}})


def ccxt_rows(source: pl.DataFrame) -> list[list[float]]:
    return [list(row) for row in source.with_columns(pl.col("ts").dt.epoch("ms")).select(COLUMNS).rows()]


def test_every_source_gives_the_same_bars(tmp_path):
    source = frame(100)
    source.write_parquet(tmp_path / "bars.parquet")
    source.write_ipc(tmp_path / "bars.feather")
    write_csv(tmp_path / "bars.csv", source)
    write_csv(tmp_path / "tabs.tsv", source, separator="\t")
    write_csv(tmp_path / "semicolons.txt", source, separator=";")
    with gzip.open(tmp_path / "bars.csv.gz", "wb") as file:
        file.write((tmp_path / "bars.csv").read_bytes())
    write_csv(tmp_path / "bare.csv", source.drop("symbol"), include_header=False)
    pandas = as_pandas(source)
    expected = Bars(source).digest()
    for name in ("bars.parquet", "bars.feather", "bars.csv", "tabs.tsv", "semicolons.txt", "bars.csv.gz"):
        assert load_bars(tmp_path / name).digest() == expected, name
    assert load_bars(str(tmp_path / "bars.csv")).digest() == expected
    assert load_bars(tmp_path / "bare.csv", columns=COLUMNS, symbol="AAA").digest() == expected
    for given in (source, source.lazy(), pandas, pandas.set_index("ts"), source.to_arrow(), source.to_dict()):
        assert load_bars(given).digest() == expected, type(given)
    assert load_bars(ccxt_rows(source), symbol="AAA").digest() == expected


@pytest.mark.parametrize(
    "stamps",
    ["%s", "%Y-%m-%d %H:%M:%S+00:00", "%d.%m.%Y %H:%M:%S.000 GMT+0000", "%Y-%m-%d %H:%M UTC", "%Y/%m/%d %H:%M:%S Z"],
)
def test_many_ways_to_write_an_instant_mean_the_same(tmp_path, stamps):
    source = frame(400)
    assert load_bars(write_csv(tmp_path / "bars.csv", source, stamps=stamps)).digest() == Bars(source).digest()


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_unix_time_is_read_in_any_unit(unit):
    source = frame(50)
    factor = {"s": 1e-3, "ms": 1, "us": 1_000, "ns": 1_000_000}[unit]
    numbers = source.with_columns((pl.col("ts").dt.epoch("ms") * factor).cast(pl.Int64))
    assert load_bars(numbers).digest() == Bars(source).digest()
    mixed = pl.concat([numbers.head(25), numbers.tail(25).with_columns(pl.col("ts") * 1_000)])
    if unit != "ns":
        with pytest.raises(DataError, match="Unix stamps in"):
            load_bars(mixed)


def test_offsets_are_honoured_row_by_row(tmp_path):
    source = frame(48)
    there = source["ts"].dt.convert_time_zone("Asia/Kolkata").dt.strftime("%Y-%m-%dT%H:%M:%S%z")
    assert load_bars(source.with_columns(ts=there)).digest() == Bars(source).digest()


def test_naive_stamps_need_a_zone(tmp_path):
    path = write_csv(tmp_path / "bars.csv", frame(50), stamps="%Y-%m-%d %H:%M:%S")
    with pytest.raises(DataError, match=r"tz='UTC'.*America/New_York"):
        load_bars(path)
    utc, york = load_bars(path, tz="UTC"), load_bars(path, tz="America/New_York")
    assert (york.ts - utc.ts == 5 * HOUR).all()
    with pytest.raises(DataError, match='Did you mean "America/New_York"'):
        load_bars(path, tz="America/NewYork")


def test_a_zone_that_would_not_be_used_is_refused():
    with pytest.raises(DataError, match="name their own zone"):
        load_bars(frame(50), tz="UTC")


def test_local_time_follows_the_clocks_of_its_zone(tmp_path):
    utc = random_bars(72).ts + (np.datetime64("2024-03-09T00:00", "ms") - random_bars(72).ts[0])
    source = frame(72).with_columns(ts=pl.Series(utc).dt.replace_time_zone("UTC"))
    local = source.with_columns(pl.col("ts").dt.convert_time_zone("America/New_York").dt.replace_time_zone(None))
    assert load_bars(local, tz="America/New_York").digest() == Bars(source).digest()
    wrong = source.with_columns(pl.col("ts").dt.replace_time_zone(None))  # has 02:00 of the day without it
    with pytest.raises(DataError, match="row 26: 2024-03-10 02:00 does not exist in America/New_York"):
        load_bars(wrong, tz="America/New_York")


def test_a_repeated_hour_is_refused_until_the_user_says_which():
    ts = pl.datetime_range(pl.datetime(2024, 11, 3, 0), pl.datetime(2024, 11, 3, 5), "1h", eager=True)
    local = frame(6).with_columns(ts=ts)
    with pytest.raises(DataError, match=r"row 1: 2024-11-03 01:00 .* occurs twice"):
        load_bars(local, tz="America/New_York")
    assert len(load_bars(local, tz="America/New_York", ambiguous="earliest")) == 6


def test_close_stamps_shift_by_one_bar():
    source = frame(50)
    late = source.with_columns(pl.col("ts") + pl.duration(hours=1))
    bars = load_bars(late, stamp="close")
    assert bars.digest() == Bars(source).digest()
    assert any("shifted back by 1:00:00" in note for note in bars.notes)


def test_a_column_that_is_named_a_close_needs_a_word():
    late = frame(50).with_columns(pl.col("ts") + pl.duration(hours=1)).rename({"ts": "close_time"})
    with pytest.raises(DataError, match="Pass stamp='close'"):
        load_bars(late)
    assert load_bars(late, stamp="close").digest() == Bars(frame(50)).digest()
    assert load_bars(late, columns={"ts": "close_time"}).ts[0] == random_bars(50).ts[1]


@pytest.mark.parametrize("stamps", ["%m/%d/%Y %H:%M", "%d/%m/%Y %H:%M"])
def test_a_late_day_tells_days_from_months(stamps, tmp_path):
    source = frame(20_000, step=MINUTE)  # the 13th comes after 17,280 rows
    path = write_csv(tmp_path / "bars.csv", source, stamps=stamps)
    assert load_bars(path, tz="UTC").digest() == Bars(source).digest()
    assert check_file(path, tz="UTC").ok


def test_repairs_happen_only_on_request_and_are_reported():
    source = frame(50)
    hole = source.with_columns(close=pl.when(pl.int_range(pl.len()) == 7).then(None).otherwise("close"))
    broken = {
        "sort": (source.reverse(), source),
        "duplicates": (pl.concat([source, source.tail(1)]), source),
        "missing": (hole, pl.concat([source.head(7), source.tail(42)])),
    }
    for name, (given, expected) in broken.items():
        with pytest.raises(DataError):
            load_bars(given)
        bars = load_bars(given, repair=[name])
        assert bars.digest() == Bars(expected).digest(), name
        assert any(note.startswith(f"repair {name}") for note in bars.notes)
    with pytest.raises(DataError, match='Did you mean "duplicates"'):
        load_bars(source, repair=["duplicate"])


def test_swapped_volume_is_put_right_on_request():
    source = frame(50).with_columns(quote_volume=pl.col("volume") * pl.col("close"))
    swap = pl.int_range(pl.len()) < 20
    swapped = source.with_columns(
        volume=pl.when(swap).then("quote_volume").otherwise("volume"),
        quote_volume=pl.when(swap).then("volume").otherwise("quote_volume"),
    )
    bars = load_bars(swapped, repair=["swapped_volume"])
    assert bars.digest() == Bars(source).digest()
    assert "repair swapped_volume: exchanged 20 rows" in bars.notes


def test_names_are_guessed_and_said():
    names = {"ts": "Date", "symbol": "Ticker", "open": "Open", "high": "High", "low": "Low", "close": "Close"}
    bars = load_bars(frame(50).rename({**names, "volume": "Volume BTC"}).with_columns(pl.lit(1.0).alias("Volume USDT")))
    assert bars.digest() != ""
    assert "ts <- 'Date'" in bars.notes[0]
    assert "volume <- 'Volume BTC'" in bars.notes[0]
    assert "quote_volume <- 'Volume USDT'" in bars.notes[0]
    odd = frame(50).rename({"close": "finish"})
    with pytest.raises(DataError, match="No column for close among"):
        load_bars(odd)
    assert load_bars(odd, columns={"close": "finish"}).digest() == Bars(frame(50)).digest()
    with pytest.raises(DataError, match='Did you mean "finish"'):
        load_bars(odd, columns={"close": "finsh"})
    with pytest.raises(DataError, match='Did you mean "close"'):
        load_bars(odd, columns={"clos": "finish"})


def test_date_and_time_in_two_columns_are_joined(tmp_path):
    source = frame(50)
    parted = source.select(
        pl.col("ts").dt.strftime("%Y.%m.%d").alias("<DATE>"),
        pl.col("ts").dt.strftime("%H:%M").alias("<TIME>"),
        *[pl.col(name).alias(f"<{name.upper()}>") for name in ("open", "high", "low", "close")],
        pl.col("volume").alias("<VOL>"),
    )
    parted.write_csv(tmp_path / "mt.csv")
    assert load_bars(tmp_path / "mt.csv", tz="UTC", symbol="AAA").digest() == Bars(source).digest()


def test_windows_line_ends_and_byte_order_marks_are_read(tmp_path):
    plain = write_csv(tmp_path / "bars.csv", frame(20)).read_bytes()
    (tmp_path / "windows.csv").write_bytes(b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n"))
    assert load_bars(tmp_path / "windows.csv").digest() == Bars(frame(20)).digest()


def test_no_volume_is_said():
    bars = load_bars(frame(50).drop("volume"))
    assert (bars.volume == 0).all()
    assert any("no volume column" in note for note in bars.notes)


def test_symbols_are_picked_by_name_and_files_joined(tmp_path):
    source = random_bars(50, ("BTC", "ETH")).frame
    assert load_bars(source, symbol="ETH").symbols == ("ETH",)
    with pytest.raises(DataError, match='Did you mean "ETH"'):
        load_bars(source, symbol="ETHH")
    paths = []
    for name in ("BTC", "ETH"):
        paths.append(tmp_path / f"{name}.parquet")
        source.filter(pl.col("symbol") == name).write_parquet(paths[-1])
    assert load_bars(paths).digest() == Bars(source).digest()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("ts,open,high,low,close,volume\n", "has no row"),
        ("20240101 000000;1;1;1;1;0\n20240101 000100;1;1;1;1;0\n", r"no header.*columns=\['ts', 'open'"),
        ("ts,open,high,low,close,volume\n1704067200,1,1,1,1,5\n1704070800,1,1,1,one,5\n", "line 3: close is 'one'"),
        ("ts,open,high,low,close,volume\n1704067200,1,1,1,1,5\nlater,1,1,1,1,5\n", "not a stamp|does not hold stamps"),
        ("ts,open,high,low,close,volume\n1/2/2024,1,1,1,1,5\n1/3/2024,1,1,1,1,5\n", "day/month or month/day"),
        ("ts,open,high,low,close,volume\nmon,1,1,1,1,5\ntue,1,1,1,1,5\n", "does not hold stamps"),
        (
            "ts,open,high,low,close,volume\n2024-01-01T00:00Z,1,1,1,1,5\n2024-01-01 01:00,1,1,1,1,5\n",
            "mix stamps with and",
        ),
        ("ts,open,high,low,close,volume\n1704067200,1,1,1,1,5,7,8\n", "cannot be read|lengths"),
    ],
)
def test_a_broken_text_file_is_refused_with_one_clear_message(tmp_path, content, message):
    path = tmp_path / "bars.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        load_bars(path)


def test_hostile_and_odd_files_are_refused(tmp_path):
    (tmp_path / "bars.pkl").write_bytes(b"cos\nsystem\n(S'echo no'\ntR.")
    (tmp_path / "bars.parquet").write_bytes(b"PAR1 this is not parquet PAR1")
    (tmp_path / "bars.csv").write_bytes(bytes(range(256)) * 20)
    refusals = (
        ("bars.pkl", "is not read"),
        ("bars.parquet", "damaged"),
        ("bars.csv", "bars.csv"),
        ("no.csv", "no file"),
    )
    for name, message in refusals:
        with pytest.raises(DataError, match=message):
            load_bars(tmp_path / name)
    for odd in (3, None, b"bytes", [[1, 2]], [], ["no-such-file.csv"]):
        with pytest.raises(DataError):
            load_bars(odd)


def test_a_pandas_frame_with_two_levels_of_columns_is_refused():
    panel = pd.DataFrame(np.ones((3, 2)), columns=pd.MultiIndex.from_tuples([("Close", "A"), ("Close", "B")]))
    with pytest.raises(DataError, match="several levels of columns"):
        load_bars(panel)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real bars are not beside this checkout")
class TestRealFiles:
    def test_the_raw_bitcoin_file_becomes_its_cleaned_twin(self):
        raw = load_bars(SHARED / "raw" / "gte_BTC_USD-Hourly.csv", repair=["sort", "swapped_volume"])
        clean = load_bars(SHARED / "crypto" / "bitstamp_btcusd_1h_2018_2022.parquet")
        for name in ("ts", "open", "high", "low", "close", "volume"):
            np.testing.assert_array_equal(getattr(raw, name), getattr(clean, name))

    def test_the_raw_euro_file_is_new_york_time(self):
        """Minute closes, read in that zone, match an independent file of hourly closes on both sides of the change."""
        path = SHARED / "raw" / "bg_EURUSD_M1_201703.csv"
        minutes = load_bars(path, columns=COLUMNS, tz="America/New_York", symbol="EUR/USD")
        hours = load_bars(SHARED / "fx" / "eurusd_1h_ask_2017.parquet")
        both = np.intersect1d(minutes.ts, hours.ts + HOUR - MINUTE)  # the last minute of an hour
        mine = minutes.close[np.isin(minutes.ts, both), 0]
        other = hours.close[np.isin(hours.ts + HOUR - MINUTE, both), 0]
        assert len(both) > 500
        assert np.abs(mine - other).max() < 0.001  # half an hour of ordinary movement is more

    def test_close_stamps_of_the_raw_perpetual_are_shifted(self):
        bars = load_bars(SHARED / "raw" / "nt_btc-perp_1m.csv", tz="UTC", stamp="close")
        assert bars.ts[0] == np.datetime64("2021-12-31T23:00", "ms")
