"""Every kind of finding has a file in which it is found, and clean files in which nothing is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from market_data import HOUR, MINUTE, SHARED, frame, random_bars

from tailguard.errors import DataError, TailguardError
from tailguard.market import load_bars, scan
from tailguard.market.check import check_file, render
from tailguard.market.findings import DataReport
from tailguard.market.problems import PROBLEMS

Trap = tuple[pl.DataFrame | str, dict[str, object]]


def at(row: int, column: str, value: object, source: pl.DataFrame | None = None) -> pl.DataFrame:
    """Good bars with one cell changed."""
    good = frame() if source is None else source
    return good.with_columns(
        pl.when(pl.int_range(pl.len()) == row)
        .then(pl.lit(value, dtype=good.schema[column]))
        .otherwise(column)
        .alias(column)
    )


def naive(source: pl.DataFrame) -> pl.DataFrame:
    return source.with_columns(pl.col("ts").dt.replace_time_zone(None))


def called_utc(source: pl.DataFrame) -> pl.DataFrame:
    return source.with_columns(pl.col("ts").dt.replace_time_zone("UTC"))


def stamped(ts: np.ndarray) -> pl.DataFrame:
    return frame(len(ts)).with_columns(ts=pl.Series(ts.astype("datetime64[ms]")).dt.replace_time_zone("UTC"))


def hours_from(start: str, n: int) -> pl.DataFrame:
    return stamped(np.datetime64(start, "ms") + HOUR * np.arange(n))


def local_clock(start: str, n: int) -> pl.DataFrame:
    """Hourly bars without a gap, stamped by the clocks of New York."""
    return hours_from(start, n).with_columns(
        pl.col("ts").dt.convert_time_zone("America/New_York").dt.replace_time_zone(None)
    )


def currency_weeks(zone: str, weeks: int = 6) -> pl.DataFrame:
    """Hourly bars from Sunday 17:00 to Friday 17:00 of New York, from February 2024, as wall-clock time of `zone`."""
    hours = np.datetime64("2024-02-04T17:00", "ms") + HOUR * np.arange(24 * 7 * weeks)
    week = ((hours - hours[0]) / HOUR).astype(int) % (24 * 7)
    wall = pl.Series(hours[week < 24 * 5]).dt.replace_time_zone("America/New_York")
    return frame(len(wall)).with_columns(ts=wall.dt.convert_time_zone(zone).dt.replace_time_zone(None))


def sessions(shift: np.timedelta64) -> pl.DataFrame:
    """Five-minute bars of ten trading days, 14:30 to 21:00, stamps moved by `shift`."""
    days = np.datetime64("2024-01-01T14:30", "ms") + np.timedelta64(1, "D") * np.arange(10)
    return stamped((days[:, None] + 5 * MINUTE * np.arange(78)).ravel() + shift)


def busy_quarters(shift: int) -> pl.DataFrame:
    """A month of minutes that are twice as wide at the quarter hour, stamps moved by `shift` minutes."""
    n = 60 * 24 * 14
    minute = np.datetime64("2024-01-01T00:00", "ms") + MINUTE * np.arange(n)
    ranges = 1.0 + 0.001 * np.random.default_rng(0).random(n) * np.where(np.arange(n) % 15 == 0, 2.0, 1.0)
    ones = np.ones(n)
    columns = {"open": ones, "high": ranges, "low": ones, "close": ones, "volume": ones}
    # A level that drifts, so that no stretch is flat.
    drift = np.exp(1e-6 * np.arange(n))
    return pl.DataFrame(
        {"ts": pl.Series(minute + shift * MINUTE).dt.replace_time_zone("UTC"), "symbol": ["A"] * n}
        | {name: values * drift for name, values in columns.items()}
    )


def text_sorted() -> pl.DataFrame:
    days = np.datetime64("2023-12-01", "D") + np.arange(90)
    texts = pl.Series(days).dt.strftime("%m/%d/%Y").sort()
    return frame(90).with_columns(ts=texts)


def mixed_units() -> pl.DataFrame:
    """Milliseconds, then microseconds, as one exchange did in 2025."""
    return frame().with_columns(pl.col("ts").dt.epoch("ms") * (1 + 999 * (pl.int_range(pl.len()) > 150)))


def off_grid() -> pl.DataFrame:
    early = frame().slice(5, 1).with_columns(pl.col("ts") - pl.duration(minutes=7))
    return pl.concat([frame().head(5), early, frame().slice(5)])


def swapped() -> pl.DataFrame:
    source = frame().with_columns(quote_volume=pl.col("volume") * pl.col("close"))
    return source.with_columns(volume="quote_volume", quote_volume="volume")


def flat() -> pl.DataFrame:
    still = pl.int_range(pl.len()).is_between(100, 150)
    return frame().with_columns(
        pl.when(still).then(100.0).otherwise(name).alias(name) for name in ("open", "high", "low", "close")
    )


def scaled_from(row: int, factor: float, names: tuple[str, ...], n: int = 300) -> pl.DataFrame:
    factors = pl.when(pl.int_range(pl.len()) >= row).then(factor).otherwise(1.0)
    return frame(n).with_columns(pl.col(name) * factors for name in names)


HEADER = "ts,open,high,low,close,volume\n"
PRICES = ("open", "high", "low", "close")
TRAPS: dict[str, Callable[[], Trap]] = {
    "empty": lambda: (HEADER, {}),
    "one_row": lambda: (frame(10).head(1), {}),
    "unreadable": lambda: (HEADER + "1704067200,1,1,1,1,5\n" * 3 + "1704070800,1,1,1,1,5,7,8,9\n", {}),
    "no_header": lambda: ("1704067200,1,1,1,1,5\n1704070800,1,1,1,1,5\n", {}),
    "wrong_dtype": lambda: (frame().with_columns(close=pl.concat_list("close")), {}),
    "not_a_number": lambda: (HEADER + "1704067200,1,1,1,1,5\n1704070800,1,1,1,one,5\n", {}),
    "missing_symbol": lambda: (at(7, "symbol", None), {}),
    "bad_stamp": lambda: (frame().with_columns(ts=pl.when(pl.int_range(pl.len()) == 7).then(None).otherwise("ts")), {}),
    "day_or_month": lambda: (HEADER + "1/2/2024,1,1,1,1,5\n1/3/2024,1,1,1,1,5\n", {"tz": "UTC"}),
    "mixed_units": lambda: (mixed_units(), {}),
    "naive": lambda: (naive(frame()), {}),
    "zone_doubt": lambda: (called_utc(currency_weeks("America/New_York")), {}),
    "mixed_zone": lambda: (HEADER + "2024-01-01T00:00Z,1,1,1,1,5\n2024-01-01 01:00,1,1,1,1,5\n", {}),
    "several_offsets": lambda: (HEADER + "2024-01-01T00:00+01:00,1,1,1,1,5\n2024-01-01T02:00+02:00,1,1,1,1,5\n", {}),
    "newest_first": lambda: (frame().reverse(), {}),
    "sorted_as_text": lambda: (text_sorted(), {"tz": "UTC"}),
    "unsorted": lambda: (pl.concat([frame().head(5), frame().slice(7, 1), frame().slice(5, 2), frame().slice(8)]), {}),
    "duplicate": lambda: (pl.concat([frame().head(7), frame().slice(6)]), {}),
    "close_stamps": lambda: (sessions(5 * MINUTE), {}),
    "maybe_close_stamps": lambda: (hours_from("2024-01-01T01:00", 240), {}),
    "dst_missing_hour": lambda: (local_clock("2024-03-08T00:00", 96), {}),
    "dst_repeated_hour": lambda: (local_clock("2024-11-01T00:00", 96), {}),
    "dst_impossible": lambda: (naive(hours_from("2024-03-09T00:00", 72)), {"tz": "America/New_York"}),
    "dst_switch": lambda: (currency_weeks("America/New_York"), {}),
    "dst_sessions": lambda: (called_utc(currency_weeks("UTC")), {}),
    "closed_hours": lambda: (currency_weeks("UTC"), {"tz": "UTC"}),
    "gap": lambda: (pl.concat([frame().head(100), frame().slice(110)]), {}),
    "off_grid": lambda: (off_grid(), {}),
    "missing_price": lambda: (at(7, "close", None), {}),
    "non_positive_price": lambda: (at(7, "low", -1.0), {}),
    "high_below_low": lambda: (at(7, "high", 1.0), {}),
    "open_outside": lambda: (at(7, "open", 110.0), {}),
    "close_outside": lambda: (at(7, "close", 110.0), {}),
    "unit_jump": lambda: (scaled_from(150, 0.25, PRICES), {}),
    "large_move": lambda: (at(7, "close", 180.0, at(7, "high", 180.0)), {}),
    "flat": lambda: (flat(), {}),
    "missing_volume": lambda: (at(7, "volume", float("nan")), {}),
    "negative_volume": lambda: (at(7, "volume", -3.0), {}),
    "swapped_volume": lambda: (swapped(), {}),
    "volume_jump": lambda: (scaled_from(2000, 20_000.0, ("volume",), 5000), {}),
    "no_volume": lambda: (frame().with_columns(volume=pl.lit(0.0)), {}),
}  # fmt: skip
# Findings that come along by nature: a naive file is naive whatever else it shows.
COMPANIONS = {
    "dst_missing_hour": {"naive", "gap"},
    "dst_repeated_hour": {"naive", "duplicate"},
    "dst_switch": {"naive", "closed_hours"},
    "dst_sessions": {"closed_hours"},
    "zone_doubt": {"closed_hours"},
    "closed_hours": {"dst_sessions"},
    "dst_impossible": {"dst_sessions"},
    "close_stamps": {"closed_hours"},
    "unsorted": {"gap"},
    "bad_stamp": {"gap"},
    "missing_symbol": {"gap"},
    "non_positive_price": {"large_move"},
    "unit_jump": {"large_move"},
    "sorted_as_text": {"gap", "closed_hours"},
}


def run(trap: Trap, folder: Path) -> DataReport:
    source, options = trap
    if isinstance(source, str):
        path = folder / "trap.csv"
        path.write_text(source)
        return check_file(path, **options)
    path = folder / "trap.parquet"
    source.write_parquet(path)
    return check_file(path, **options)


def test_every_kind_of_finding_has_its_trap():
    assert set(TRAPS) == set(PROBLEMS)


@pytest.mark.parametrize("code", TRAPS)
def test_a_trap_is_caught_and_named(code, tmp_path):
    report = run(TRAPS[code](), tmp_path)
    found = set(report.codes())
    assert code in found, render(report)
    tiny = report.rows <= 4  # a file of a few equal rows shows other things too
    assert tiny or found <= {code} | COMPANIONS.get(code, set()), render(report)
    item = next(item for item in report.findings if item.code == code)
    assert item.severity == PROBLEMS[code].severity
    assert report.ok == (not report.codes("error"))
    assert report.exit_code == (0 if report.ok else 1)
    assert code in render(report)
    assert item.fix in render(report)


@pytest.mark.parametrize("code", ["missing_price", "high_below_low", "close_outside", "negative_volume", "bad_stamp"])
def test_the_row_is_named(code, tmp_path):
    report = run(TRAPS[code](), tmp_path)
    assert next(item for item in report.findings if item.code == code).row == 7


def test_a_line_with_too_many_fields_is_named(tmp_path):
    report = run(TRAPS["unreadable"](), tmp_path)
    assert "unreadable at line 5: 6 fields are expected in '1704070800,1,1,1,1,5,7,8,9'" in render(report)


def test_rows_of_text_files_are_given_as_lines(tmp_path):
    at(7, "volume", -3.0).with_columns(pl.col("ts").dt.strftime("%s")).write_csv(tmp_path / "bars.csv")
    assert "negative_volume at line 9: volume -3" in render(check_file(tmp_path / "bars.csv"))


@pytest.mark.parametrize(
    "source",
    [
        frame(),
        random_bars(300, ("A", "B", "C")).frame,
        random_bars(300, ("A", "B", "C")).frame.sort("symbol", "ts"),
        sessions(0 * MINUTE),
        busy_quarters(0),
        frame(5000, step=MINUTE),
        frame(2000, step=5 * MINUTE),
        stamped(np.datetime64("2024-01-01", "ms") + np.timedelta64(1, "D") * np.arange(300)),
    ],
    ids=["hours", "panel", "symbol by symbol", "sessions", "busy quarters", "minutes", "five minutes", "days"],
)
def test_clean_bars_pass_without_error_or_warning(source, tmp_path):
    source.write_parquet(tmp_path / "bars.parquet")
    report = check_file(tmp_path / "bars.parquet")
    assert not report.codes("error"), render(report)
    assert not report.codes("warning"), render(report)
    assert load_bars(source).bars_per_year == pytest.approx(report.bars_per_year)


def test_close_stamps_show_in_activity_and_a_declaration_settles_it(tmp_path):
    busy_quarters(1).write_parquet(tmp_path / "bars.parquet")
    assert "close_stamps" in check_file(tmp_path / "bars.parquet").codes("error")
    for stamp in ("open", "close"):
        assert check_file(tmp_path / "bars.parquet", stamp=stamp).ok


def test_close_stamps_show_in_the_name_and_in_the_last_second():
    assert "close_stamps" in check_file(frame().rename({"ts": "close_time"})).codes("error")
    ends = frame().with_columns(pl.col("ts") + pl.duration(minutes=59, seconds=59, milliseconds=999))
    assert "close_stamps" in check_file(ends).codes("error")


@pytest.mark.parametrize("zone", ["America/New_York", "UTC", "Europe/London"])
def test_the_zone_of_naive_stamps_is_told_by_the_currency_week(zone):
    naive_finding = next(item for item in check_file(currency_weeks(zone, weeks=12)).findings if item.code == "naive")
    assert f"tz={zone!r}" in naive_finding.fix


def test_accepted_findings_become_notes():
    split = scaled_from(150, 0.25, PRICES)
    assert not check_file(split).ok
    assert check_file(split, accept=["unit_jump", "large_move"]).ok
    with pytest.raises(DataError, match='Did you mean "unit_jump"'):
        check_file(split, accept=["unit_jmp"])


def test_all_problems_of_a_file_are_reported_at_once():
    broken = naive(at(7, "volume", -3.0, at(9, "high", 1.0))).reverse()
    assert set(check_file(broken).codes("error")) == {"naive", "newest_first", "negative_volume", "high_below_low"}


def test_the_calendar_shows_where_bars_are_missing():
    report = check_file(currency_weeks("UTC"), tz="UTC")
    assert "Sat  ....." in report.calendar
    assert "Wed  ######" in report.calendar
    days = stamped(np.datetime64("2020-01-01", "ms") + np.timedelta64(1, "D") * np.arange(1500))
    hole = pl.concat([days.head(366), days.slice(366 + 90)])
    assert "2021 ...999999999" in check_file(hole).calendar


def test_small_batches_find_the_same(tmp_path, monkeypatch):
    """The pass over a file larger than memory: every check works across the seams of batches."""
    for code in ("unsorted", "duplicate", "gap", "unit_jump", "newest_first", "dst_repeated_hour", "swapped_volume"):
        whole = run(TRAPS[code](), tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(scan, "BATCH_ROWS", 41)
            assert run(TRAPS[code](), tmp_path) == whole, code


PEAK = """
import sys
from pathlib import Path
from tailguard.market import scan
from tailguard.market.check import check_file

def anonymous_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 1024

peaks, totals = [], scan._totals
def watched(clean, facts):
    totals(clean, facts)
    peaks.append(anonymous_mb())
scan._totals, scan.MAX_STAMPS = watched, 0
assert check_file(sys.argv[1]).ok
print(max(peaks[: len(peaks) // 2]), max(peaks))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_does_not_grow_with_the_file(tmp_path):
    """The second half of 370 MB of text takes no more memory than the first."""
    n, path = 8_000_000, tmp_path / "bars.csv"
    price = pl.lit(100.0) + (pl.int_range(n) % 97) / 1000
    seconds = pl.int_range(1_600_000_000, 1_600_000_000 + n).alias("ts")
    pl.select(seconds, *[price.alias(name) for name in PRICES], pl.lit(1.0).alias("volume")).write_csv(path)
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    half, whole = (float(mb) for mb in done.stdout.split())
    assert whole < half + 50


@pytest.mark.parametrize("role", ["ts", "symbol", "close", "volume"])
@pytest.mark.parametrize(
    "odd",
    [
        pl.lit(b"bytes"),
        pl.lit(1.0).reshape((1, 1)).first(),
        pl.concat_list(pl.lit(1.0)),
        pl.struct(pl.lit(1.0)),
        pl.duration(hours=1),
        pl.time(1),
        pl.lit("x").cast(pl.Categorical),
        pl.lit(None),
        pl.lit(True),
    ],
    ids=["bytes", "array", "list", "struct", "duration", "time", "categorical", "null", "bool"],
)
def test_a_column_of_an_odd_type_is_refused_not_crashed_on(role, odd):
    source = frame(20).with_columns(odd.alias(role))
    if role == "symbol" and source.schema[role] == pl.Categorical:
        assert load_bars(source).symbols == ("x",)
        return
    with pytest.raises(DataError):
        load_bars(source)
    with suppress(DataError):
        assert not check_file(source).ok


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(min_size=1, max_size=400)
    | st.text("0123456789.,;-:TZ \n\"'eEnNaA+", max_size=200).map(str.encode)
)
def test_no_file_content_breaks_the_check(content, tmp_path):
    for head in (b"", HEADER.encode()):
        path = tmp_path / "noise.csv"
        path.write_bytes(head + content)
        for read in (check_file, load_bars):
            with suppress(TailguardError):
                read(path)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real bars are not beside this checkout")
class TestRealFiles:
    @pytest.mark.parametrize("path", sorted(SHARED.glob("*/*.parquet")), ids=lambda path: path.stem)
    def test_the_cleaned_files_pass(self, path):
        report = check_file(path)
        assert report.ok, render(report)
        assert set(report.codes("warning")) <= {"gap"}, render(report)

    def test_gaps_are_counted(self):
        ada = check_file(SHARED / "crypto" / "freqtrade_adabtc_5m.parquet")
        gap = next(item for item in ada.findings if item.code == "gap")
        assert (gap.count, gap.value.split(";")[0]) == (5, "40 bars missing")
        euro = check_file(SHARED / "fx" / "eurusd_1h_ask_2017.parquet")
        assert sum(item.count for item in euro.findings if item.code in ("gap", "closed_hours")) == 52

    def test_the_bitcoin_trap(self):
        report = check_file(SHARED / "raw" / "gte_BTC_USD-Hourly.csv")
        assert set(report.codes("error")) == {"newest_first", "swapped_volume"}
        assert next(item for item in report.findings if item.code == "swapped_volume").count == 20_143

    def test_the_euro_trap(self):
        report = check_file(SHARED / "raw" / "bg_EURUSD_M1_201703.csv")
        assert set(report.codes("error")) == {"no_header", "naive"}
        assert "dst_switch" in report.codes()
        assert "tz='America/New_York'" in render(report)
        names = ["ts", "open", "high", "low", "close", "volume"]
        assert check_file(SHARED / "raw" / "bg_EURUSD_M1_201703.csv", columns=names, tz="America/New_York").ok

    def test_the_perpetual_trap(self):
        report = check_file(SHARED / "raw" / "nt_btc-perp_1m.csv")
        assert set(report.codes("error")) == {"naive", "close_stamps"}
        assert check_file(SHARED / "raw" / "nt_btc-perp_1m.csv", tz="UTC", stamp="close").ok
