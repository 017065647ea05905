"""Sources: files, frames and rows -> bars, without a silent repair.

`load_bars` takes what it is told, guesses only names and formats, says what it took (`Bars.notes`), and refuses the
rest with the row, the value and the fix.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import polars as pl

from tailguard.errors import DataError, did_you_mean
from tailguard.market.bar_rules import PRICES, STAMP
from tailguard.market.bars import Bars
from tailguard.market.layout import Layout, fitted_layout, guess_layout
from tailguard.market.shapes import reshaped
from tailguard.market.stamps import StampReading, recognise, require_zone, show, to_utc, unix_units, within_years
from tailguard.market.tables import Columns, Table, collect, named_panics, no_header_fix, open_source
from tailguard.market.written_numbers import NumberStyle, number_style

Frame = TypeVar("Frame", pl.DataFrame, pl.LazyFrame)
Stamp = Literal["open", "close"]

REPAIRS = {
    "sort": "sort rows by stamp",
    "duplicates": "keep the last of the rows that share a stamp",
    "missing": "drop rows without a price",
    "swapped_volume": "exchange base and quote volume where they are swapped",
    "missing_volume": "write 0 where volume is empty",
    "adjust": "multiply all prices of a bar by adjusted close over close",
}
MENDED = {
    "sort": ("newest_first", "unsorted", "sorted_as_text"),
    "duplicates": ("duplicate",),
    "missing": ("missing_price",),
    "swapped_volume": ("swapped_volume",),
    "missing_volume": ("missing_volume",),
    "adjust": ("unit_jump",),
}
"""What the data check finds and each repair puts right."""


@named_panics
def load_bars(
    source: Any,
    *,
    symbol: str | None = None,
    stamp: Stamp = "open",
    tz: str | None = None,
    columns: Columns | None = None,
    ambiguous: Literal["raise", "earliest", "latest"] = "raise",
    repair: Collection[str] = (),
) -> Bars:
    """Validated bars from a CSV, parquet or feather file, a pandas or polars frame, ccxt rows, or a list of files.

    symbol:    picks one symbol of a source that names them, or names the only one
    stamp:     whether a stamp is the open or the close of its bar; `close` shifts by one bar
    tz:        zone of naive stamps ("UTC", "America/New_York"); without it they are refused
    columns:   names of the columns of a file without header, or {role: source column} where guessing fails
    ambiguous: which of two equal wall-clock times is meant where a clock is set back
    repair:    named repairs, each reported in `Bars.notes`; see REPAIRS
    """
    for name in repair:
        if name not in REPAIRS:
            raise DataError(f"repair has {name!r}.{did_you_mean(name, REPAIRS)} Known: {', '.join(REPAIRS)}.")
    if stamp not in ("open", "close"):
        raise DataError(f"stamp={stamp!r}; a stamp is the 'open' or the 'close' of its bar.")
    if isinstance(source, list | tuple) and source and all(isinstance(part, str | Path) for part in source):
        parts = [
            load_bars(part, stamp=stamp, tz=tz, columns=columns, ambiguous=ambiguous, repair=repair) for part in source
        ]
        together = pl.concat([part.frame for part in parts], how="diagonal_relaxed")
        return _pick(Bars(together, notes=[note for part in parts for note in part.notes]), symbol)
    table = open_source(source, columns)
    if columns is None:
        table = reshaped(table)
    if table.first_row_is_data:
        raise DataError(f"{table.label} has no header: its first line is data. {no_header_fix(table)}")
    frame = collect(table)
    if not frame.height:
        raise DataError(f"{table.label} has no row.")
    table, frame, layout = arranged(table, frame, columns)
    notes = list(table.notes)
    if layout.stamped_at_close and stamp == "open":
        raise DataError(
            f"{table.label}: the column {layout.roles['ts']!r} holds the close of bars. Pass stamp='close'; if it is "
            f"the open after all, pass columns={{'ts': {layout.roles['ts']!r}}}."
        )
    reading = _reading(stamp_column(frame, layout), table)
    if "symbol" not in layout.roles:
        notes.append(f"symbol: {symbol or table.name!r}" + ("" if symbol else ", for want of a column that says it"))
    notes.append(f"stamps: {reading.label}, taken as bar {stamp}" + (f" in {tz}" if tz else ""))
    bars = _canonical(frame, layout, table, symbol, _utc(frame, layout, reading, table, tz, ambiguous))
    bars = _repaired(bars, repair, notes)
    adjusted = layout.roles.get("adj_close")
    if "adjust" in repair:
        bars = _adjusted(bars, adjusted, notes)
    elif adjusted is not None and bars.schema[adjusted].is_numeric():
        notes.append(_adjustment(bars, adjusted))
    if stamp == "close":
        bars = _shifted(bars, notes)
    return _pick(Bars(bars, notes=notes), symbol)


def arranged(table: Table, sample: pl.DataFrame, columns: Columns | None) -> tuple[Table, pl.DataFrame, Layout]:
    """Table and sample with plain numbers, and which column is what; the table's notes say what was taken for what."""
    given = columns if isinstance(columns, Mapping) else None
    roles = guess_layout(sample.columns, given).roles
    figures = [*dict.fromkeys(name for role, name in roles.items() if role not in ("ts", "symbol"))]
    style = number_style(sample, figures, table.separator)
    notes: list[str] = []
    if style is not None:
        sample = with_plain_numbers(sample, figures, style)
        table = replace(table, lazy=with_plain_numbers(table.lazy, figures, style))
        notes = [style.note] if style.note else []
    layout = fitted_layout(sample, given)
    return replace(table, notes=(*table.notes, *layout.notes, *notes)), sample, layout


def with_plain_numbers(frame: Frame, names: Collection[str], style: NumberStyle) -> Frame:
    """The frame, eager or lazy, with text of these columns rewritten as plain numbers."""
    schema = frame.collect_schema()
    return frame.with_columns(style.plain(pl.col(name)).alias(name) for name in names if schema[name] == pl.String)


def stamp_column(frame: pl.DataFrame, layout: Layout) -> pl.Series:
    """The stamps as they stand in the source, date and time joined where they are apart."""
    column = within_years(frame[layout.roles["ts"]])
    if layout.time is None:
        return column
    return column.cast(pl.String) + " " + within_years(frame[layout.time]).cast(pl.String)


def _reading(column: pl.Series, table: Table) -> StampReading:
    """How to read the stamps, or a clear refusal."""
    reading = recognise(column.head(10_000))
    if reading is not None and reading.ambiguous_with:
        reading = recognise(column)  # a later 13th of a month tells days from months
    if reading is None:
        raise DataError(
            f"{table.label}: the column {column.name!r} does not hold stamps ({column.head(3).to_list()}). "
            f"Use ISO text, Unix time or a date column, or name another with columns={{'ts': ...}}."
        )
    if reading.ambiguous_with:
        raise DataError(
            f"{table.label}: stamps like {column[0]!r} read as day/month or month/day alike. Write dates as YYYY-MM-DD."
        )
    return reading


def _canonical(frame: pl.DataFrame, layout: Layout, table: Table, symbol: str | None, ms: pl.Series) -> pl.DataFrame:
    """The canonical columns and the extras; numbers that are not numbers are refused."""
    roles = layout.roles
    out: dict[str, pl.Series] = {"ts": ms.cast(STAMP)}
    if "symbol" in roles:
        out["symbol"] = names_of(frame[roles["symbol"]])
    else:
        out["symbol"] = pl.repeat(symbol or table.name, frame.height, eager=True)
    for role in (*PRICES, "volume", "quote_volume"):
        if role in roles:
            out[role] = numbers(frame[roles[role]], role, table)
    if "volume" not in out:
        out["volume"] = pl.repeat(0.0, frame.height, eager=True)
    used = {*(source for role, source in roles.items() if role != "adj_close"), layout.time}
    extras = {name: _loosely_numeric(frame[name]) for name in frame.columns if name not in used and name not in out}
    return pl.DataFrame({**out, **extras})


def numbers(column: pl.Series, role: str, table: Table) -> pl.Series:
    """The column as float64; the first cell that is no number is named."""
    if not may_hold_numbers(column.dtype):
        raise DataError(f"{table.label}: {role} has the type {column.dtype}. Store the column as float64 or int64.")
    values = column.cast(pl.Float64, strict=False)
    broken = (values.is_null() & column.is_not_null()).arg_true()
    if len(broken):
        row = int(broken[0])
        raise DataError(
            f"{table.label}, {table.place(row)}: {role} is {column[row]!r}, which is not a number; {len(broken)} such "
            f"cells. Write plain numbers with a decimal point and no thousands separator, or drop the rows."
        )
    return values


def may_hold_numbers(dtype: pl.DataType) -> bool:
    """Numbers, or text that may be numbers; not dates, lists, bytes or categories."""
    return dtype.is_numeric() or dtype in (pl.String, pl.Null)


def names_of(column: pl.Series) -> pl.Series:
    """A symbol column as text."""
    if not (column.dtype.is_numeric() or column.dtype in (pl.String, pl.Categorical, pl.Enum, pl.Null)):
        raise DataError(f"The symbol column {column.name!r} has the type {column.dtype}. Symbols are text.")
    return column.cast(pl.String)


def _utc(
    frame: pl.DataFrame, layout: Layout, reading: StampReading, table: Table, tz: str | None, ambiguous: str
) -> pl.Series:
    """UTC milliseconds of every row, or the row whose instant is not known."""
    column = stamp_column(frame, layout)
    if reading.how == "unix" and len(units := unix_units(column)) > 1:
        raise DataError(
            f"{table.label}: Unix stamps in {' and '.join(units)} in one column. Write all of them in milliseconds."
        )
    parsed = reading.parse(column)
    ms, aware = parsed["ms"], parsed["aware"]
    if ms.null_count():
        row = int(ms.is_null().arg_max() or 0)
        raise DataError(
            f"{table.label}, {table.place(row)}: {column[row]!r} is not a stamp like the others ({reading.label}), or "
            "not one of the years 1600 to 2999."
        )
    if aware.all():
        if tz is not None:
            raise DataError(
                f"{table.label}: stamps name their own zone ({reading.label}), so tz={tz!r} is not used. Leave it out."
            )
        return ms
    if aware.any():
        row = int((aware != aware[0]).arg_max() or 0)
        raise DataError(
            f"{table.label}, {table.place(row)}: {column[row]!r} and {column[0]!r} mix stamps with and without a zone. "
            f"Write every stamp with its offset."
        )
    if tz is None:
        raise DataError(
            f"{table.label}: stamps such as {column[0]!r} do not say their time zone. If they are UTC pass tz='UTC'; "
            f"if they are exchange time pass its zone, such as tz='America/New_York'."
        )
    instants = to_utc(ms, require_zone(tz), ambiguous)
    if instants.null_count():
        row = int(instants.is_null().arg_max() or 0)
        raise DataError(
            f"{table.label}, {table.place(row)}: {show(ms[row])} does not exist in {tz} or occurs twice: clocks "
            f"change. Export in UTC, correct tz=, or say ambiguous='earliest' or 'latest' for repeated hours."
        )
    return instants


def _repaired(frame: pl.DataFrame, repair: Collection[str], notes: list[str]) -> pl.DataFrame:
    """Only what the user named, each with the number of rows it touched."""
    if "missing" in repair:
        kept = frame.filter(pl.all_horizontal(pl.col(*PRICES).is_finite().fill_null(False)))
        notes.append(f"repair missing: dropped {frame.height - kept.height} rows")
        frame = kept
    if "sort" in repair:
        ordered = frame.sort("ts", maintain_order=True)
        moved = int((ordered["ts"] != frame["ts"]).sum())
        notes.append(f"repair sort: {moved} rows moved")
        frame = ordered
    if "duplicates" in repair:
        kept = frame.unique(subset=["ts", "symbol"], keep="last", maintain_order=True)
        notes.append(f"repair duplicates: dropped {frame.height - kept.height} rows")
        frame = kept
    if "missing_volume" in repair:
        lost = ~pl.col("volume").is_finite().fill_null(False)
        notes.append(f"repair missing_volume: {int(frame.select(lost.sum()).item())} rows set to 0")
        frame = frame.with_columns(volume=pl.when(lost).then(0.0).otherwise("volume"))
    if "swapped_volume" in repair:
        if "quote_volume" not in frame.columns:
            raise DataError("repair 'swapped_volume' needs a quote volume; name it with columns={'quote_volume': ...}.")
        swapped = swapped_volume()
        notes.append(f"repair swapped_volume: exchanged {int(frame.select(swapped.sum()).item())} rows")
        frame = frame.with_columns(
            volume=pl.when(swapped).then("quote_volume").otherwise("volume"),
            quote_volume=pl.when(swapped).then("volume").otherwise("quote_volume"),
        )
    return frame


def _adjusted(frame: pl.DataFrame, adjusted: str | None, notes: list[str]) -> pl.DataFrame:
    """Prices after splits and dividends, by one factor per bar."""
    if adjusted is None or not frame.schema[adjusted].is_numeric():
        raise DataError(
            "repair 'adjust' needs numbers of an adjusted close: name them with columns={'adj_close': ...}."
        )
    factor = pl.col(adjusted) / pl.col("close")
    wrong = frame.select((~((factor > 0) & factor.is_finite())).fill_null(True)).to_series()
    if wrong.any():
        row = int(wrong.arg_max() or 0)
        raise DataError(f"Row {row} has no usable adjusted close: {frame.row(row)}. Drop the row or do not adjust.")
    changed = int(frame.select((pl.col(adjusted) != pl.col("close")).sum()).item())
    notes.append(f"repair adjust: prices of {changed} bars multiplied by adjusted close over close")
    return frame.with_columns(pl.col(name) * factor for name in PRICES)


def _adjustment(frame: pl.DataFrame, adjusted: str) -> str:
    """What an adjusted close that is not used would change."""
    share = frame.select((pl.col(adjusted) / pl.col("close") - 1).abs().fill_nan(None).max()).item() or 0.0
    if share < 1e-6:
        return f"{adjusted!r} equals the close"
    return (
        f"{adjusted!r} is not used: it differs from the close by up to {share:.1%} (splits, dividends). "
        "repair=['adjust'] multiplies all prices by it"
    )


def swapped_volume() -> pl.Expr:
    """True where volume / quote_volume is the price, which only quote / base can be."""
    base, quote = pl.col("volume"), pl.col("quote_volume")
    as_named, exchanged = (quote / base / pl.col("close")).log().abs(), (base / quote / pl.col("close")).log().abs()
    return ((base > 0) & (quote > 0) & (exchanged < 0.1) & (as_named > 0.5)).fill_null(False)


def _shifted(frame: pl.DataFrame, notes: list[str]) -> pl.DataFrame:
    """Close stamps -> open stamps, by the most frequent difference."""
    steps = frame.select(pl.col("ts").diff().over("symbol").drop_nulls().mode().min())
    step = steps.item() if steps.height else None
    if step is None:
        raise DataError("One bar does not say how long a bar is, so its close stamp cannot be shifted to its open.")
    notes.append(f"stamp='close': shifted back by {step}")
    return frame.with_columns(ts=pl.col("ts") - step)


def _pick(bars: Bars, symbol: str | None) -> Bars:
    if symbol is None or bars.symbols == (symbol,):
        return bars
    if symbol not in bars.symbols:
        raise DataError(
            f"No symbol {symbol!r}.{did_you_mean(symbol, bars.symbols)} There are {list(bars.symbols)[:20]}."
        )
    return Bars(bars.frame.filter(pl.col("symbol") == symbol), notes=[*bars.notes, f"symbol {symbol!r} picked"])


def _loosely_numeric(column: pl.Series) -> pl.Series:
    """Extras of a text file become numbers when all of them are."""
    if column.dtype != pl.String:
        return column
    values = column.cast(pl.Float64, strict=False)
    return values if values.null_count() == column.null_count() else column
