"""Bars: prices that were checked once and cannot change afterwards.

Two views of one data set: `frame`, a polars frame with one row per bar and symbol, and the panel, numpy arrays of
shape (T, A). `ts` is the open of a bar, in UTC; what bar t says is known at ts + step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from tailguard.errors import DataError
from tailguard.market.bar_rules import (
    COLUMNS,
    PRICES,
    Floats,
    Mask,
    Stamps,
    check_clock,
    check_panel,
    checked_frame,
)

_YEAR = np.timedelta64(31_557_600_000, "ms")  # 365.25 days
_WEEK = np.timedelta64(604_800_000, "ms")


class Bars:
    """Validated OHLCV bars of one or many symbols on a shared clock; immutable.

    The clock `ts` holds every stamp at which at least one symbol has a bar. A bar that a symbol lacks is a missing row
    of `frame` and, in the panel, `tradable` False with NaN prices and zero volume: no price is ever filled in.
    """

    __slots__ = ("_extras", "_frame", "_panel", "_tradable", "_ts", "bars_per_year", "notes", "step", "symbols")

    symbols: tuple[str, ...]
    """Column order of the panel."""
    step: np.timedelta64
    """Length of a bar: the most frequent difference between stamps, in milliseconds."""
    bars_per_year: float
    """Bars per 365.25 days as observed: nights, weekends and holidays without bars lower it."""
    notes: tuple[str, ...]
    """What the loader took from the source, in plain words."""

    _ts: Stamps
    _panel: dict[str, Floats]
    _tradable: Mask
    _extras: dict[str, Floats]
    _frame: pl.DataFrame | None

    def __init__(self, frame: pl.DataFrame, *, notes: Sequence[str] = ()) -> None:
        """From a frame with the columns `ts symbol open high low close volume`; more columns are kept as extras."""
        frame = checked_frame(frame)
        stamps = _stamps_of(frame)
        ts = stamps[np.concatenate([[True], stamps[1:] != stamps[:-1]])]  # sorted, so neighbours tell
        symbols = tuple(frame["symbol"].unique(maintain_order=True).to_list())
        where = _cells(frame, ts, symbols)
        panel = {name: _spread(frame[name], where, len(ts), len(symbols)) for name in (*PRICES, "volume")}
        tradable = np.zeros((len(ts), len(symbols)), dtype=np.bool_)
        tradable[where] = True
        extras = {
            name: _spread(frame[name], where, len(ts), len(symbols))
            for name, dtype in frame.schema.items()
            if name not in COLUMNS and dtype.is_numeric()
        }
        self._fill(ts, symbols, panel, tradable, extras, notes=notes, frame=frame)

    @classmethod
    def from_arrays(
        cls,
        ts: Stamps,
        symbols: Sequence[str],
        open: npt.ArrayLike,
        high: npt.ArrayLike,
        low: npt.ArrayLike,
        close: npt.ArrayLike,
        volume: npt.ArrayLike,
        tradable: npt.ArrayLike | None = None,
        *,
        extras: Mapping[str, npt.ArrayLike] | None = None,
        step: np.timedelta64 | None = None,
    ) -> Self:
        """From a panel: `ts` (T,) UTC bar opens, prices and volume (T, A), or (T,) for one symbol.

        Without `tradable`, a cell whose four prices are all NaN is a missing bar; one with some NaN is an error.
        """
        shape = (len(ts), len(symbols))
        given = {"open": open, "high": high, "low": low, "close": close, "volume": volume}
        panel = {name: _as_panel(name, values, shape) for name, values in given.items()}
        if tradable is None:
            mask = ~np.logical_and.reduce([np.isnan(panel[name]) for name in PRICES])
        else:
            mask = np.array(tradable, dtype=np.bool_).reshape(shape)
        more = {name: _as_panel(name, values, shape) for name, values in (extras or {}).items()}
        bars = cls.__new__(cls)
        bars._fill(np.asarray(ts).astype("datetime64[ms]"), tuple(symbols), panel, mask, more, step=step)
        return bars

    def _fill(
        self,
        ts: Stamps,
        symbols: tuple[str, ...],
        panel: dict[str, Floats],
        tradable: Mask,
        extras: Mapping[str, Floats],
        *,
        step: np.timedelta64 | None = None,
        bars_per_year: float | None = None,
        notes: Sequence[str] = (),
        frame: pl.DataFrame | None = None,
    ) -> None:
        """The one place where fields are set: blank what is not tradable, check, freeze."""
        check_clock(ts, symbols)
        for name in PRICES:
            panel[name] = np.where(tradable, panel[name], np.nan)
        panel["volume"] = np.where(tradable, panel["volume"], 0.0)
        check_panel(ts, symbols, panel, tradable)
        put = object.__setattr__
        put(self, "symbols", symbols)
        put(self, "step", _modal_step(ts) if step is None else step.astype("timedelta64[ms]"))
        put(self, "bars_per_year", observed_rate(ts, self.step) if bars_per_year is None else bars_per_year)
        put(self, "notes", tuple(notes))
        put(self, "_ts", _frozen(ts))
        put(self, "_panel", {name: _frozen(values) for name, values in panel.items()})
        put(self, "_tradable", _frozen(tradable))
        put(self, "_extras", {name: _frozen(values) for name, values in extras.items()})
        put(self, "_frame", frame)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Bars cannot change, so Bars.{name} cannot be set. Build new bars with Bars.from_arrays.")

    def __reduce__(self) -> tuple[Any, ...]:
        """For worker processes: the default would set attributes one by one, which bars refuse."""
        fields = (self._ts, self.symbols, self._panel, self._tradable, self._extras)
        return _restore, (fields, self.step, self.bars_per_year, self.notes, self._frame)

    def __len__(self) -> int:
        return len(self._ts)

    def __repr__(self) -> str:
        first, last = np.datetime_as_string(self._ts[[0, -1]], unit="m")
        step = self.step.astype("timedelta64[s]")
        return (
            f"Bars({len(self)} bars of {step}, {len(self.symbols)} symbols, {first} to {last} UTC, "
            f"{self.bars_per_year:.0f} bars per year)"
        )

    @property
    def ts(self) -> Stamps:
        """(T,) bar opens, UTC, datetime64[ms]."""
        return self._ts

    @property
    def open(self) -> Floats:
        """(T, A) first price of the bar."""
        return self._panel["open"]

    @property
    def high(self) -> Floats:
        """(T, A) highest price of the bar."""
        return self._panel["high"]

    @property
    def low(self) -> Floats:
        """(T, A) lowest price of the bar."""
        return self._panel["low"]

    @property
    def close(self) -> Floats:
        """(T, A) last price of the bar."""
        return self._panel["close"]

    @property
    def volume(self) -> Floats:
        """(T, A) units of the base asset traded in the bar; 0 where there is no bar."""
        return self._panel["volume"]

    @property
    def tradable(self) -> Mask:
        """(T, A) True where the symbol has a bar."""
        return self._tradable

    @property
    def extras(self) -> Mapping[str, Floats]:
        """Other numeric columns by name, each (T, A), NaN where there is no bar."""
        return dict(self._extras)

    @property
    def frame(self) -> pl.DataFrame:
        """One row per bar and symbol, sorted by stamp; missing bars are missing rows."""
        if self._frame is None:
            object.__setattr__(self, "_frame", self._as_frame())
        assert self._frame is not None  # noqa: S101  for the type checker
        return self._frame.clone()  # polars can change a frame in place

    def _as_frame(self) -> pl.DataFrame:
        t, a = np.nonzero(self._tradable)
        columns: dict[str, Any] = {
            "ts": pl.Series(self._ts[t]).dt.replace_time_zone("UTC"),
            "symbol": pl.Series(np.array(self.symbols, dtype=object)[a].tolist(), dtype=pl.String),
        }
        columns.update({name: values[t, a] for name, values in {**self._panel, **self._extras}.items()})
        return pl.DataFrame(columns)

    def slice(self, start: int, stop: int) -> Bars:
        """Bars start .. stop - 1; `step` and `bars_per_year` stay those of the whole, which knows them better."""
        if not 0 <= start < stop <= len(self):
            raise DataError(
                f"slice({start}, {stop}) is not inside the {len(self)} bars; use 0 <= start < stop <= {len(self)}."
            )
        rows = np.s_[start:stop]
        frame = None
        if self._frame is not None:
            first, last = (pl.lit(self._ts[i]).dt.replace_time_zone("UTC") for i in (start, stop - 1))
            frame = self._frame.filter(pl.col("ts").is_between(first, last))
        part = object.__new__(Bars)
        part._fill(
            self._ts[rows],
            self.symbols,
            {name: values[rows] for name, values in self._panel.items()},
            self._tradable[rows],
            {name: values[rows] for name, values in self._extras.items()},
            step=self.step,
            bars_per_year=self.bars_per_year,
            notes=self.notes,
            frame=frame,
        )
        return part

    def scale_after(self, t: int, factor: float) -> Bars:
        """The same bars up to and with bar t, and another future: what comes later is multiplied by `factor`."""
        scale = np.where(np.arange(len(self)) > t, float(factor), 1.0)[:, None]
        other = object.__new__(Bars)
        other._fill(
            self._ts,
            self.symbols,
            {name: values * scale for name, values in self._panel.items()},
            self._tradable,
            {name: values * scale for name, values in self._extras.items()},
            step=self.step,
            bars_per_year=self.bars_per_year,
        )
        return other

    def digest(self) -> str:
        """sha256 of stamps, symbols and every number: equal exactly when the panels are equal."""
        sha = hashlib.sha256()
        sha.update(repr((len(self), self.symbols, tuple(self._extras))).encode())
        sha.update(self._ts.astype("<i8").tobytes())
        sha.update(self._tradable.tobytes())
        for values in (*self._panel.values(), *self._extras.values()):
            canonical = np.where(np.isnan(values), np.nan, values)  # NaN has many bit patterns, a digest needs one
            sha.update(canonical.astype("<f8").tobytes())
        return sha.hexdigest()


def _restore(
    fields: tuple[Any, ...], step: np.timedelta64, rate: float, notes: tuple[str, ...], frame: pl.DataFrame | None
) -> Bars:
    bars = object.__new__(Bars)
    bars._fill(*fields, step=step, bars_per_year=rate, notes=notes, frame=frame)
    return bars


def _stamps_of(frame: pl.DataFrame) -> Stamps:
    return frame["ts"].dt.replace_time_zone(None).to_numpy().astype("datetime64[ms]")


def _cells(
    frame: pl.DataFrame, ts: Stamps, symbols: tuple[str, ...]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Panel position (t, a) of every row."""
    column = frame["symbol"].replace_strict(list(symbols), list(range(len(symbols))), return_dtype=pl.Int64)
    return np.searchsorted(ts, _stamps_of(frame)), column.to_numpy().astype(np.intp)


def _spread(column: pl.Series, where: tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]], t: int, a: int) -> Floats:
    panel = np.full((t, a), np.nan)
    panel[where] = column.cast(pl.Float64).to_numpy()
    return panel


def _as_panel(name: str, values: npt.ArrayLike, shape: tuple[int, int]) -> Floats:
    array = np.array(values, dtype=np.float64)
    if array.ndim == 1 and shape[1] == 1:
        array = array[:, None]
    if array.shape != shape:
        raise DataError(f"{name} has shape {array.shape}, but {shape[0]} stamps and {shape[1]} symbols need {shape}.")
    return array


def _frozen(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values = np.ascontiguousarray(values).copy()
    values.flags.writeable = False
    return values


def _modal_step(ts: Stamps) -> np.timedelta64:
    if len(ts) < 2:
        raise DataError("One bar does not say how long a bar is. Load at least two, or pass step=.")
    differences, counts = np.unique(np.diff(ts), return_counts=True)
    modal: np.timedelta64 = differences[counts.argmax()]
    return modal


def observed_rate(ts: Stamps, step: np.timedelta64) -> float:
    """Bars per 365.25 days, counted in whole weeks: a span cut in mid-week would count the weekend wrongly."""
    span = ts[-1] - ts[0] + step
    weeks = span // _WEEK
    if weeks >= 1:
        span = weeks * _WEEK
    return float(np.searchsorted(ts, ts[0] + span) * (_YEAR / span))
