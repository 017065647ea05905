"""Files as their sources write them, each read with at most `tz` by `load_bars`, and found fine by the data check."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
from market_data import random_bars

from tailguard.errors import DataError
from tailguard.market import Bars, load_bars
from tailguard.market.check import check_file

DAY = np.timedelta64(86_400_000, "ms")
PRICES = ("open", "high", "low", "close")


def daily(symbols: tuple[str, ...] = ("AAPL",), n: int = 40) -> Bars:
    """Bars with two decimals, as exports have them."""
    frame = random_bars(n, symbols, step=DAY).frame
    return Bars(frame.with_columns(pl.col(*PRICES).round(2), pl.col("volume").mul(1e6).round(0)))


def pandas_of(bars: Bars, symbol: str = "AAPL", index: str | None = None) -> pd.DataFrame:
    rows = bars.frame.filter(pl.col("symbol") == symbol)
    stamps = pd.DatetimeIndex(rows["ts"].dt.replace_time_zone(None).to_numpy(), name=index)
    return pd.DataFrame({name.title(): rows[name].to_list() for name in (*PRICES, "volume")}, index=stamps)


def klines_of(bars: Bars) -> list[list[object]]:
    """Rows as Binance's archive and API give them."""
    rows = []
    for ts, o, h, low, c, v in bars.frame.select(pl.col("ts").dt.epoch("ms"), *PRICES, "volume").rows():
        rows.append([ts, f"{o:.2f}", f"{h:.2f}", f"{low:.2f}", f"{c:.2f}", f"{v:.3f}", ts + 86_399_999])
        rows[-1] += [f"{v * c:.3f}", 308, f"{v / 2:.3f}", f"{v * c / 2:.3f}", "0"]
    return rows


def agree(bars: Bars, expected: Bars, names: tuple[str, ...] = (*PRICES, "volume")) -> None:
    np.testing.assert_array_equal(bars.ts, expected.ts)
    for name in names:
        np.testing.assert_allclose(getattr(bars, name), getattr(expected, name), rtol=1e-12, err_msg=name)


def read(path: Path, tz: str | None = None, **options: object) -> Bars:
    """What both readers make of a file; the check may find nothing that loading would not."""
    report = check_file(path, tz=tz)
    assert report.ok, [(item.code, item.value) for item in report.findings]
    bars = load_bars(path, tz=tz, **options)  # type: ignore[arg-type]
    assert report.rows == bars.frame.height
    assert len(report.symbols) == len(bars.symbols)
    return bars


def test_pandas_with_an_index_without_a_name(tmp_path):
    pandas_of(daily()).to_csv(tmp_path / "bars.csv")
    assert (tmp_path / "bars.csv").read_text().startswith(",Open")
    agree(read(tmp_path / "bars.csv", "UTC"), daily())


def test_pandas_that_counted_its_rows_beside_a_date(tmp_path):
    pandas_of(daily(), index="Date").reset_index().to_csv(tmp_path / "bars.csv")
    agree(read(tmp_path / "bars.csv", "UTC"), daily())


@pytest.mark.parametrize("packing", ["csv", "zip", "csv.gz"])
@pytest.mark.parametrize("unit", [1, 1_000])  # microseconds since 2025
def test_binance_klines_without_header(tmp_path, packing, unit):
    rows = [[row[0] * unit, *row[1:6], row[6] * unit, *row[7:]] for row in klines_of(daily())]
    text = "".join(",".join(map(str, row)) + "\n" for row in rows)
    path = tmp_path / f"BTCUSDT-1d-2024-01.{packing}"
    if packing == "zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as folder:
            folder.writestr("BTCUSDT-1d-2024-01.csv", text)
    else:
        path.write_bytes(gzip.compress(text.encode()) if packing.endswith("gz") else text.encode())
    bars = read(path)
    agree(bars, daily())
    assert bars.symbols == ("BTCUSDT-1d-2024-01",)
    assert any("no header: the columns are those of Binance klines" in note for note in bars.notes)


def test_klines_in_another_order_are_not_taken_for_binance(tmp_path):
    text = "".join(",".join(map(str, [row[0], row[2], row[4], *row[3:]])) + "\n" for row in klines_of(daily()))
    (tmp_path / "bars.csv").write_text(text)
    with pytest.raises(DataError, match="has no header"):
        load_bars(tmp_path / "bars.csv")


@pytest.mark.parametrize("name", ["BTC_USDT-1d.json", "BTC_USDT-1d.json.gz"])
def test_json_of_ccxt_and_freqtrade(tmp_path, name):
    rows = [list(row) for row in daily().frame.select(pl.col("ts").dt.epoch("ms"), *PRICES, "volume").rows()]
    text = json.dumps(rows).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    bars = read(tmp_path / name)
    agree(bars, daily())
    assert bars.symbols == ("BTC_USDT-1d",)


def test_json_of_the_binance_api_and_of_pandas(tmp_path):
    (tmp_path / "klines.json").write_text(json.dumps(klines_of(daily())))
    agree(read(tmp_path / "klines.json"), daily())
    agree(load_bars(klines_of(daily())), daily())
    frame = pandas_of(daily(), index="Date")
    for orient in ("columns", "split"):
        frame.to_json(tmp_path / "pandas.json", orient=orient, date_format="iso")
        agree(read(tmp_path / "pandas.json", "UTC"), daily())
    frame.reset_index().to_json(tmp_path / "records.json", orient="records", date_format="iso")
    agree(read(tmp_path / "records.json", "UTC"), daily())


def yahoo(symbols: tuple[str, ...], **columns: float) -> pd.DataFrame:
    """What `yfinance.download` returns: fields and tickers as two levels of columns."""
    bars = daily(symbols)
    parts = {symbol: pandas_of(bars, symbol, "Date").assign(**columns) for symbol in symbols}
    frame = pd.concat(parts, axis=1, names=["Ticker", "Price"]).swaplevel(axis=1).sort_index(axis=1)
    return frame


@pytest.mark.parametrize("symbols", [("AAPL",), ("AAPL", "MSFT")])
def test_yfinance_with_its_three_lines_of_header(tmp_path, symbols):
    yahoo(symbols).to_csv(tmp_path / "yahoo.csv")
    assert (tmp_path / "yahoo.csv").read_text().startswith("Price,Close")
    bars = read(tmp_path / "yahoo.csv", "America/New_York")
    assert bars.symbols == symbols
    agree(load_bars(tmp_path / "yahoo.csv", tz="UTC"), daily(symbols))
    agree(load_bars(yahoo(symbols), tz="UTC"), daily(symbols))
    grouped = yahoo(symbols).swaplevel(axis=1).sort_index(axis=1)  # group_by="ticker"
    grouped.to_csv(tmp_path / "grouped.csv")
    agree(read(tmp_path / "grouped.csv", "UTC"), daily(symbols))


def test_wide_closes(tmp_path):
    bars = daily(("AAPL", "C", "LOW", "V"))
    wide = pl.DataFrame(
        {"Date": np.datetime_as_string(bars.ts, unit="D"), **dict(zip(bars.symbols, bars.close.T, strict=True))}
    )
    wide.with_columns(V=pl.when(pl.int_range(pl.len()) < 3).then(None).otherwise("V")).write_csv(
        tmp_path / "closes.csv"
    )
    found = read(tmp_path / "closes.csv", "UTC")
    assert found.symbols == bars.symbols
    np.testing.assert_array_equal(found.close[3:], bars.close[3:])
    assert not found.tradable[:3, 3].any()
    for name in ("open", "high", "low"):
        np.testing.assert_array_equal(getattr(found, name), found.close)
    assert any(note.startswith("a guess: 4 columns are the closes") for note in found.notes)
    assert any(note.startswith("only closes") for note in found.notes)


@pytest.mark.parametrize(
    "pattern", ["{field}_{symbol}", "{symbol}.{field}", "{symbol} {field}", "('{field}', '{symbol}')"]
)
def test_wide_fields_of_symbols(tmp_path, pattern):
    bars = daily(("AAPL", "BRK_B"))
    columns = {
        pattern.format(field=name.title(), symbol=symbol): getattr(bars, name)[:, i]
        for name in (*PRICES, "volume")
        for i, symbol in enumerate(bars.symbols)
    }
    pl.DataFrame({"Date": np.datetime_as_string(bars.ts, unit="D"), **columns}).write_csv(tmp_path / "wide.csv")
    found = read(tmp_path / "wide.csv", "UTC")
    assert found.symbols == bars.symbols
    agree(found, bars)


@pytest.mark.parametrize("name", ["Close", "Price", "Adj Close", "SP500"])
def test_a_series_of_closes(tmp_path, name):
    series = pl.DataFrame({"Date": np.datetime_as_string(daily().ts, unit="D"), name: daily().close[:, 0]})
    series.write_csv(tmp_path / "index.csv")
    bars = read(tmp_path / "index.csv", "UTC")
    agree(bars, daily(), ("close",))
    assert any("an order is filled a whole bar later" in note for note in bars.notes)


def test_misspelt_prices_are_not_taken_for_symbols(tmp_path):
    odd = pandas_of(daily(), index="Date").rename(columns={"Open": "opn", "High": "hgh", "Low": "lw", "Close": "cls"})
    odd.drop(columns="Volume").to_csv(tmp_path / "bars.csv")
    with pytest.raises(DataError, match="No column for open, high, low, close"):
        load_bars(tmp_path / "bars.csv", tz="UTC")


def test_semicolons_with_decimal_commas(tmp_path):
    pandas_of(daily(), index="Datum").rename_axis("Date").to_csv(tmp_path / "bars.csv", sep=";", decimal=",")
    bars = read(tmp_path / "bars.csv", "UTC")
    agree(bars, daily())
    assert any(note.startswith("numbers: '") for note in bars.notes)


def test_commas_of_thousands_in_a_file_of_semicolons(tmp_path):
    rows = ["2024-01-01;1.234,50;1.240,00;1.230,25;1.235,75", "2024-01-02;999,5;1.001,0;998,25;999,75"]
    (tmp_path / "bars.csv").write_text("\n".join(["Date;Open;High;Low;Close", *rows]))
    assert load_bars(tmp_path / "bars.csv", tz="UTC").close[:, 0].tolist() == [1235.75, 999.75]


def investing(bars: Bars) -> str:
    lines = ['"Date","Price","Open","High","Low","Vol.","Change %"']
    for ts, o, h, low, c, v in reversed(bars.frame.select("ts", *PRICES, "volume").rows()):
        prices = ",".join(f'"{price * 30:,.2f}"' for price in (c, o, h, low))
        lines.append(f'"{ts:%m/%d/%Y}",{prices},"{v / 1e6:,.2f}M","0.50%"')
    return "\n".join(lines) + "\n"


def test_investing_com(tmp_path):
    (tmp_path / "S&P 500.csv").write_text("\ufeff" + investing(daily()), encoding="utf-8")
    bars = read(tmp_path / "S&P 500.csv", "America/New_York")
    np.testing.assert_allclose(bars.close, np.round(daily().close * 30, 2), rtol=1e-12)
    np.testing.assert_allclose(bars.volume, np.round(daily().volume / 1e6, 2) * 1e6, rtol=1e-9)
    assert (bars.close > 1_000).any()
    assert any("from new to old, as this source writes them" in note for note in bars.notes)
    assert any(note.startswith("numbers: '3,") and "is read as 3" in note for note in bars.notes)


def test_nasdaq_com(tmp_path):
    lines = ["Date,Close/Last,Volume,Open,High,Low"]
    for ts, o, h, low, c, v in reversed(daily().frame.select("ts", *PRICES, "volume").rows()):
        lines.append(f"{ts:%m/%d/%Y},${c:.2f},{v:.0f},${o:.2f},${h:.2f},${low:.2f}")
    (tmp_path / "nasdaq.csv").write_text("\n".join(lines))
    agree(read(tmp_path / "nasdaq.csv", "UTC"), daily())


def test_metatrader_4_without_header(tmp_path):
    rows = (
        daily()
        .frame.select(pl.col("ts").dt.strftime("%Y.%m.%d,%H:%M"), *PRICES, pl.col("volume").cast(pl.Int64))
        .rows()
    )
    (tmp_path / "EURUSD1440.csv").write_text("".join(",".join(map(str, row)) + "\r\n" for row in rows))
    bars = read(tmp_path / "EURUSD1440.csv", "UTC")
    agree(bars, daily())
    assert any("no header: the columns are those of MetaTrader" in note for note in bars.notes)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-16-be"])
def test_metatrader_5_counts_ticks_where_it_knows_no_volume(tmp_path, encoding):
    lines = ["<DATE>\t<TIME>\t<OPEN>\t<HIGH>\t<LOW>\t<CLOSE>\t<TICKVOL>\t<VOL>\t<SPREAD>"]
    for ts, o, h, low, c, v in daily().frame.select("ts", *PRICES, "volume").rows():
        lines.append(f"{ts:%Y.%m.%d}\t{ts:%H:%M:%S}\t{o}\t{h}\t{low}\t{c}\t{v:.0f}\t0\t3")
    text = "\r\n".join(lines) + "\r\n"
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    (tmp_path / "EURUSD_D1.csv").write_bytes(mark + text.encode(encoding))
    bars = read(tmp_path / "EURUSD_D1.csv", "UTC")
    agree(bars, daily())
    assert any("volume <- '<TICKVOL>', because '<VOL>' holds none" in note for note in bars.notes)


def test_an_adjusted_close_is_named_or_used(tmp_path):
    frame = pandas_of(daily(), index="Date")
    frame["Adj Close"] = frame["Close"] * np.where(np.arange(len(frame)) < 20, 0.25, 1.0)
    frame.to_csv(tmp_path / "yahoo.csv")
    plain = read(tmp_path / "yahoo.csv", "UTC")
    agree(plain, daily())
    assert any("differs from the close by up to 75.0%" in note and "repair=['adjust']" in note for note in plain.notes)
    adjusted = load_bars(tmp_path / "yahoo.csv", tz="UTC", repair=["adjust"])
    np.testing.assert_allclose(adjusted.close[:, 0], frame["Adj Close"], rtol=1e-12)
    np.testing.assert_allclose(adjusted.low[:20], daily().low[:20] / 4, rtol=1e-12)
    assert "repair adjust: prices of 20 bars multiplied by adjusted close over close" in adjusted.notes
    with pytest.raises(DataError, match="needs numbers of an adjusted close"):
        load_bars(daily().frame, repair=["adjust"])


def test_volume_that_is_missing_is_zero_on_request_and_where_there_is_none(tmp_path):
    frame = pandas_of(daily(), index="Date")
    frame["Volume"] = None
    frame.to_csv(tmp_path / "none.csv")
    assert (load_bars(tmp_path / "none.csv", tz="UTC").volume == 0).all()
    frame["Volume"] = ["-", *["1,000"] * (len(frame) - 1)]
    frame.to_csv(tmp_path / "some.csv")
    with pytest.raises(DataError, match=r"repair=\['missing_volume'\]"):
        load_bars(tmp_path / "some.csv", tz="UTC")
    found = load_bars(tmp_path / "some.csv", tz="UTC", repair=["missing_volume"])
    assert found.volume[:2, 0].tolist() == [0.0, 1000.0]


@pytest.mark.parametrize(
    "text", ["{", "[]", "3", "[[1,2],[3]]", '{"a": 1}', "[" * 100_000, '[{"a": 1}]', '[["2", [], {}, 1, 2, 3]]']
)
def test_other_json_is_refused(tmp_path, text):
    (tmp_path / "bars.json").write_text(text)
    with pytest.raises(DataError):
        load_bars(tmp_path / "bars.json")


def test_zips_are_bounded_and_hold_one_file(tmp_path):
    path = tmp_path / "bomb.zip"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as folder,
        folder.open("bars.csv", "w", force_zip64=True) as file,
    ):
        for _ in range(300):
            file.write(bytes(2**20))
    with pytest.raises(DataError, match="unpacks to"):
        load_bars(path)
    with zipfile.ZipFile(path, "w") as folder:
        folder.writestr("a.csv", "a")
        folder.writestr("b.csv", "b")
    with pytest.raises(DataError, match="holds 2 files"):
        load_bars(path)
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(DataError, match="damaged zip"):
        load_bars(path)
    good = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED)
    with good:
        good.writestr("bars.csv", investing(daily()))
    path.write_bytes(path.read_bytes().replace(b"bars.csv", b"bars.csw", 1))  # the two names no longer agree
    with pytest.raises(DataError, match="cannot be unpacked"):
        load_bars(path)


def test_text_that_grows_beyond_memory_when_it_is_parsed_is_refused_before_it_is_read(tmp_path, monkeypatch):
    rows = [list(row) for row in daily().frame.select(pl.col("ts").dt.epoch("ms"), *PRICES, "volume").rows()]
    (tmp_path / "bars.json").write_text(json.dumps(rows))
    (tmp_path / "bars.csv").write_text(investing(daily()), encoding="utf-16")
    size = max(file.stat().st_size for file in tmp_path.iterdir())
    monkeypatch.setattr("tailguard.market.unpacked.physical_memory", lambda: 2 * size)
    for name in ("bars.json", "bars.csv"):
        with pytest.raises(DataError, match="more than the memory of this machine takes in this format"):
            load_bars(tmp_path / name, tz="UTC")


@pytest.mark.parametrize("spoilt", ["\r", "x" * 200_000], ids=["carriage return", "long cell"])
def test_a_line_that_csv_cannot_read_is_refused_or_read_but_never_a_traceback(tmp_path: Path, spoilt: str) -> None:
    rows = [f"2020-01-{day:02d},1,2,0.5,1.5,{day}" for day in range(1, 29)]
    file = tmp_path / "bars.csv"
    file.write_bytes("\n".join(["date,open,high,low,close,volume", f"2019-12-31,1{spoilt}1,2", *rows]).encode())
    with pytest.raises(DataError):
        load_bars(file, tz="UTC")
