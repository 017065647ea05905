"""Rules every bar obeys; the first that is broken is named with its row, its value and the fix."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import polars as pl

from tailguard.errors import DataError

PRICES = ("open", "high", "low", "close")
COLUMNS = ("ts", "symbol", *PRICES, "volume")
STAMP = pl.Datetime("ms", "UTC")

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Stamps = npt.NDArray[np.datetime64]


def checked_frame(frame: pl.DataFrame) -> pl.DataFrame:
    """Canonical types and order; refuses what would need a guess."""
    missing = [name for name in COLUMNS if name not in frame.columns]
    if missing:
        raise DataError(f"The frame lacks {missing}; it has {frame.columns}. Rename its columns, or use load_bars.")
    if frame.height == 0:
        raise DataError("The frame has no row; bars need at least two.")
    dtype = frame.schema["ts"]
    if not isinstance(dtype, pl.Datetime) or dtype.time_zone is None:
        raise DataError(
            f"ts has the type {dtype}, which does not say which time zone is meant. Use load_bars(..., tz='UTC') "
            f"or the zone the stamps were written in."
        )
    frame = frame.with_columns(
        pl.col("ts").cast(STAMP), pl.col("symbol").cast(pl.String), pl.col(*PRICES, "volume").cast(pl.Float64)
    )
    if frame["ts"].null_count() or frame["symbol"].null_count():
        row = int(frame.select((pl.col("ts").is_null() | pl.col("symbol").is_null()).arg_max()).item())
        raise DataError(f"Row {row} has no stamp or no symbol: {frame.row(row)}. Drop the row or complete it.")
    check_order(frame)
    nulls = frame.select(pl.any_horizontal(pl.col(*PRICES, "volume").is_null())).to_series()
    if nulls.any():
        row = int(nulls.arg_max() or 0)
        prices = any(frame[name].null_count() for name in PRICES)
        fix = "A missing bar is a missing row: drop it, or use load_bars(..., repair=['missing'])."
        if not prices:
            fix = "Write 0 where volume is not known, or use load_bars(..., repair=['missing_volume'])."
        raise DataError(f"Row {row} has an empty {'price' if prices else 'volume'}: {frame.row(row)}. {fix}")
    return frame.select(*COLUMNS, pl.exclude(*COLUMNS)).sort("ts", maintain_order=True)


def check_order(frame: pl.DataFrame) -> None:
    """Stamps of each symbol must rise; the first that does not is named."""
    ordered = frame.with_row_index("row").with_columns(before=pl.col("ts").shift().over("symbol"))
    wrong = ordered.filter(pl.col("ts") <= pl.col("before"))
    if not wrong.height:
        return
    row = wrong.row(0, named=True)
    if row["ts"] == row["before"]:
        what = "repeats the stamp of"
        fix = "Find out which is right and drop the other, or keep the last with load_bars(..., repair=['duplicates'])."
    else:
        what, fix = "is earlier than", "Sort by ts before loading, or use load_bars(..., repair=['sort'])."
    raise DataError(
        f"Row {row['row']}: {row['ts']} of {row['symbol']!r} {what} the row before it ({row['before']}); "
        f"{wrong.height} such rows in all. {fix}"
    )


def check_clock(ts: Stamps, symbols: tuple[str, ...]) -> None:
    if ts.ndim != 1 or len(ts) == 0:
        raise DataError(f"ts has shape {ts.shape}; bars need a vector of at least one stamp.")
    if not symbols or len(set(symbols)) != len(symbols):
        raise DataError(f"symbols={symbols!r}: give each column its own name.")
    if np.isnat(ts).any():
        raise DataError(f"Bar {int(np.isnat(ts).argmax())} has no stamp (NaT).")
    wrong = np.flatnonzero(np.diff(ts) <= np.timedelta64(0, "ms"))
    if len(wrong):
        t = int(wrong[0]) + 1
        raise DataError(
            f"Bar {t}: {ts[t]} does not come after {ts[t - 1]}. Stamps must rise strictly; sort or drop repeats."
        )


def check_panel(ts: Stamps, symbols: tuple[str, ...], panel: Mapping[str, Floats], tradable: Mask) -> None:
    """Every number of every tradable bar, with the place and value of the first that cannot be."""
    o, h, l, c = (panel[name] for name in PRICES)  # noqa: E741  the usual letters
    v = panel["volume"]
    with np.errstate(invalid="ignore"):  # comparisons with the NaN of missing bars are False, which is what is meant
        rules = [
            (
                ~np.isfinite(o + h + l + c),
                "a price is not a finite number",
                "Drop the row: a missing bar is a missing row.",
            ),
            (
                (o <= 0) | (h <= 0) | (l <= 0) | (c <= 0),
                "a price is not positive",
                "Drop the row or correct the price.",
            ),
            (h < l, "high is below low", "The columns may be in another order: pass columns=."),
            ((o > h) | (o < l), "open is outside [low, high]", "Correct the row; the columns may be in another order."),
            (
                (c > h) | (c < l),
                "close is outside [low, high]",
                "Correct the row; the columns may be in another order.",
            ),
            (~(np.isfinite(v) & (v >= 0)), "volume is negative or not a number", "Use 0 where volume is unknown."),
        ]
    for broken, what, fix in rules:
        at = np.argwhere(broken & tradable)
        if len(at):
            t, a = (int(i) for i in at[0])
            values = ", ".join(f"{name}={panel[name][t, a]:.10g}" for name in (*PRICES, "volume"))
            raise DataError(
                f"Bar {t} ({ts[t]} UTC) of {symbols[a]!r}: {what}: {values}; {len(at)} such bars in all. {fix}"
            )
