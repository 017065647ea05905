"""Stamps: what a column of dates, texts or numbers says about time, and what it leaves open.

A stamp that names its zone (an offset, Unix time, a zone-aware column) is one instant. A naive stamp is wall-clock time
somewhere; it becomes an instant only when the user says where.
"""

from __future__ import annotations

from dataclasses import dataclass
from zoneinfo import ZoneInfo, available_timezones

import polars as pl

from tailguard.errors import DataError, did_you_mean

EARLIEST_MS, LATEST_MS = -11_676_096_000_000, 32_503_680_000_000
"""Years 1600 to 2999: beyond them zones are not defined, and polars breaks down."""
FARTHEST_HOURS = 15
"""Of a zone from UTC: none was ever further than 15 h 14."""
DAY_MS = 86_400_000
HOUR_MS = 3_600_000

# Day-first and month-first formats are both listed: a column that fits both is refused, not guessed.
_FORMATS = (
    "%Y-%m-%d %H:%M:%S%.f",
    "%Y-%m-%d %H:%M",
    "%Y-%m-%d",
    "%Y/%m/%d %H:%M:%S%.f",
    "%Y/%m/%d %H:%M",
    "%Y/%m/%d",
    "%Y.%m.%d %H:%M:%S%.f",
    "%Y.%m.%d %H:%M",
    "%Y.%m.%d",
    "%Y%m%d %H%M%S",
    "%Y%m%d %H:%M:%S%.f",
    "%Y%m%d %H:%M",
    "%d.%m.%Y %H:%M:%S%.f",
    "%d.%m.%Y %H:%M",
    "%d.%m.%Y",
    "%m/%d/%Y %H:%M:%S%.f",
    "%d/%m/%Y %H:%M:%S%.f",
    "%m/%d/%Y %H:%M",
    "%d/%m/%Y %H:%M",
    "%m/%d/%Y",
    "%d/%m/%Y",
    "%b %d, %Y",
    "%d %b %Y",
)
_TWINS = {first: first.replace("%m/%d", "%d/%m") for first in _FORMATS if first.startswith("%m/%d")}
_ZONE = r"\s*(Z|UTC|GMT|(?:UTC|GMT)?[+-]\d{2}:?\d{2}|[+-]\d{2})$"
_UNIX_UNITS = (("s", 1e11, 1000.0), ("ms", 1e14, 1.0), ("us", 1e17, 1e-3), ("ns", float("inf"), 1e-6))


@dataclass(frozen=True)
class StampReading:
    """How to read one column of stamps."""

    how: str
    """`datetime`, `date`, `unix`, `yyyymmdd` or `text`."""
    detail: str = ""
    """The text format or the time zone."""
    ambiguous_with: str = ""
    """The other text format that fits as well (day and month could be either)."""

    @property
    def label(self) -> str:
        """For people: what was taken."""
        return f"{self.how} {self.detail}".strip()

    def parse(self, column: pl.Series) -> pl.DataFrame:
        """Columns `ms` since 1970 (UTC where `aware`, else wall clock; null where unreadable, also for years before
        1600 and after 2999) and `aware`."""
        parsed = self.parsed(column)
        return parsed.with_columns(ms=pl.when(pl.col("ms").is_between(EARLIEST_MS, LATEST_MS)).then("ms"))

    def parsed(self, column: pl.Series) -> pl.DataFrame:
        """Before impossible years are taken out."""
        if self.how == "unix":
            return _parse_unix(column)
        if self.how == "yyyymmdd":
            column, form = column.cast(pl.Int64, strict=False).cast(pl.String), "%Y%m%d"
            return _wall_clock(column.str.to_datetime(form, strict=False, time_unit="ms"))
        if self.how == "text":
            return _parse_text(column, self.detail)
        aware = isinstance(column.dtype, pl.Datetime) and column.dtype.time_zone is not None
        ms = column.cast(pl.Datetime("ms")) if not aware else column.dt.convert_time_zone("UTC")
        return pl.DataFrame(
            {"ms": ms.dt.epoch("ms"), "aware": pl.repeat(aware, len(column), dtype=pl.Boolean, eager=True)}
        )


def recognise(column: pl.Series) -> StampReading | None:
    """How to read the column, judged on the values given; None when no way of reading fits most of them."""
    if isinstance(column.dtype, pl.Datetime):
        return StampReading("datetime", column.dtype.time_zone or "without zone")
    if column.dtype == pl.Date:
        return StampReading("date", "without zone")
    if column.dtype.is_numeric():
        return _recognise_numbers(column.drop_nulls().cast(pl.Float64))
    if column.dtype not in (pl.String, pl.Categorical):
        return None
    texts = column.cast(pl.String).drop_nulls()
    numbers = texts.cast(pl.Float64, strict=False)
    if len(texts) and numbers.null_count() == 0:
        return _recognise_numbers(numbers)
    body = _split_offset(texts)["body"]
    fits = {form: body.str.to_datetime(form, strict=False).null_count() for form in _FORMATS}
    best = min(fits, key=lambda form: fits[form])
    if not len(texts) or fits[best] > len(texts) // 2:
        return None
    twin = _TWINS.get(best, "")
    return StampReading("text", best, ambiguous_with=twin if twin and fits[twin] == fits[best] else "")


def within_years(column: pl.Series) -> pl.Series:
    """The column with null for dates and times that no reader can show, before anything asks for them one by one."""
    if not isinstance(column.dtype, pl.Datetime | pl.Date):
        return column
    unit = column.dtype.time_unit if isinstance(column.dtype, pl.Datetime) else "day"
    per_ms = {"ns": 1_000_000, "us": 1_000, "ms": 1}.get(unit, 0)
    low, high = (ms * per_ms if per_ms else ms // DAY_MS for ms in (EARLIEST_MS, LATEST_MS))
    usual = column.to_physical().is_between(max(low, -(2**63)), min(high, 2**63 - 1))
    return pl.select(pl.when(usual).then(column).alias(column.name)).to_series()


def to_utc(ms: pl.Series, tz: str, ambiguous: str = "raise") -> pl.Series:
    """Wall-clock milliseconds in `tz` -> UTC milliseconds; null where the clock skipped or repeated that time."""
    wall = ms.cast(pl.Datetime("ms"))
    repeated = "null" if ambiguous == "raise" else ambiguous
    there = wall.dt.replace_time_zone(tz, ambiguous=repeated, non_existent="null")  # type: ignore[arg-type]
    return there.dt.convert_time_zone("UTC").dt.epoch("ms")


def require_zone(tz: str) -> str:
    """The zone name, if the system knows it."""
    known = available_timezones()
    if tz not in known:
        raise DataError(
            f"tz={tz!r} is not a time zone.{did_you_mean(tz, known)} Use names like 'UTC' or 'Europe/London'."
        )
    return tz


def clock_changes(tz: str, first_ms: int, last_ms: int) -> list[tuple[int, int]]:
    """(UTC milliseconds, change of the offset in milliseconds) of every clock change of `tz` in the span."""
    zone, changes = ZoneInfo(tz), []
    hours = pl.Series(range(first_ms // HOUR_MS, last_ms // HOUR_MS + 1, 24), dtype=pl.Int64)
    if len(hours) < 2:
        return []
    offsets = _offset_ms(hours * HOUR_MS, zone.key)
    for day in (offsets.diff().fill_null(0) != 0).arg_true():
        start = int(hours[int(day) - 1])
        fine = pl.Series(range(start, start + 25), dtype=pl.Int64)
        steps = _offset_ms(fine * HOUR_MS, zone.key).diff().fill_null(0)
        hour = int((steps != 0).arg_max() or 0)
        changes.append((int(fine[hour]) * HOUR_MS, int(steps[hour])))
    return changes


def show(ms: int | None) -> str:
    """2021-03-14 02:30, for messages."""
    if ms is None:
        return "no stamp"
    text = pl.Series([ms]).cast(pl.Datetime("ms")).dt.strftime("%Y-%m-%d %H:%M:%S%.3f").item()
    return str(text).removesuffix(".000").removesuffix(":00")


def _offset_ms(utc_ms: pl.Series, tz: str) -> pl.Series:
    utc = utc_ms.cast(pl.Datetime("ms", "UTC"))
    return utc.dt.convert_time_zone(tz).dt.replace_time_zone(None).dt.epoch("ms") - utc_ms


def _recognise_numbers(numbers: pl.Series) -> StampReading | None:
    if not len(numbers):
        return None
    low, high = float(numbers.min()), float(numbers.max())  # type: ignore[arg-type]
    if low >= 19_000_101 and high <= 21_001_231:
        return StampReading("yyyymmdd")
    return StampReading("unix", "time") if low > 1e8 else None  # 1973; smaller numbers are counters, not dates


def _parse_unix(column: pl.Series) -> pl.DataFrame:
    values = column.cast(pl.Float64, strict=False)
    scale = pl.lit(None, dtype=pl.Float64)
    for _, limit, factor in reversed(_UNIX_UNITS):
        scale = pl.when(pl.col("v") < limit).then(factor).otherwise(scale)
    ms = pl.DataFrame({"v": values}).select(ms=(pl.col("v") * scale).round().cast(pl.Int64, strict=False))
    return ms.with_columns(aware=pl.lit(True))


def unix_units(column: pl.Series) -> list[str]:
    """Units that occur in a column of Unix stamps; more than one means that the exporter changed its mind."""
    values = column.cast(pl.Float64, strict=False).drop_nulls()
    found, floor = [], float("-inf")
    for unit, limit, _ in _UNIX_UNITS:
        if ((values >= floor) & (values < limit)).any():
            found.append(unit)
        floor = limit
    return found


def _wall_clock(stamps: pl.Series) -> pl.DataFrame:
    return pl.DataFrame(
        {"ms": stamps.dt.epoch("ms"), "aware": pl.repeat(False, len(stamps), dtype=pl.Boolean, eager=True)}
    )


def _split_offset(texts: pl.Series) -> pl.DataFrame:
    """Text without its zone, and the zone: `body` and `zone` (null when there is none)."""
    clean = texts.cast(pl.String).str.strip_chars()
    # An offset needs a time in front of it, else the -01 of 2021-01-01 would be one.
    zone = clean.str.extract(r"(?i)\d:\d.*?" + _ZONE, 1)
    body = pl.DataFrame({"clean": clean, "zone": zone}).select(
        pl.when(pl.col("zone").is_null()).then("clean").otherwise(pl.col("clean").str.replace(r"(?i)" + _ZONE, ""))
    )
    return pl.DataFrame({"body": body.to_series().str.replace(r"^(\d.*\d)T(\d)", "${1} ${2}"), "zone": zone})


def _parse_text(column: pl.Series, form: str) -> pl.DataFrame:
    parts = _split_offset(column).with_columns(
        wall=pl.col("body").str.to_datetime(form, strict=False, time_unit="ms").dt.epoch("ms"),
        digits=pl.col("zone").str.extract(r"([+-]\d{2}:?(?:\d{2})?)$", 1).str.replace(":", ""),
    )
    sign = pl.when(pl.col("digits").str.starts_with("-")).then(-1).otherwise(1)
    hours = pl.col("digits").str.slice(1, 2).cast(pl.Int64, strict=False).fill_null(0)
    minutes = pl.col("digits").str.slice(3, 2).cast(pl.Int64, strict=False).fill_null(0)
    offset = sign * (hours * HOUR_MS + minutes * 60_000)
    known = (hours <= FARTHEST_HOURS) & (minutes < 60)
    return parts.select(ms=pl.when(known).then(pl.col("wall") - offset), aware=pl.col("zone").is_not_null())


def zones_in(column: pl.Series) -> list[str]:
    """Distinct zone suffixes of a text column, '' for naive stamps."""
    if column.dtype != pl.String:
        return []
    return sorted(str(zone) for zone in _split_offset(column.drop_nulls())["zone"].fill_null("").unique().to_list())
