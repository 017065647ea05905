"""Scan: one pass over a table in batches, keeping counts and first places, never the table.

Memory does not grow with the file, except for eight bytes per row (up to MAX_STAMPS rows) to find stamps that repeat
far apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tailguard.market.bar_rules import PRICES
from tailguard.market.layout import Layout
from tailguard.market.sources import may_hold_numbers, names_of, stamp_column, swapped_volume
from tailguard.market.stamps import DAY_MS, StampReading, show, to_utc, unix_units, zones_in
from tailguard.market.tables import FAILURES, Table, ragged_line

BATCH_ROWS = 100_000
MAX_STAMPS = 20_000_000
MAX_GAPS = 100_000
FLAT_BARS = 20
SYMBOL_BITS = 16

_JUMP = float(np.log(1.8))
_LARGE = 0.5  # log return: +65 %, -39 %
_FACTORS = np.log([2, 3, 4, 5, 6, 7, 8, 10, 15, 20, 25, 30, 50, 100, 1_000, 10_000, 1_000_000])
_NUMBERS = (*PRICES, "volume", "quote_volume")


@dataclass
class Hit:
    """The first place of something, and how often it occurs."""

    row: int
    value: str
    count: int


@dataclass(frozen=True)
class Gap:
    """Two neighbouring stamps of a symbol, further apart than a bar or in the wrong order."""

    before: int
    after: int
    row: int


@dataclass
class Facts:
    """What one pass over a table leaves behind."""

    rows: int = 0
    symbols: dict[str, int] = field(default_factory=dict)
    """Number of each, in order of appearance."""
    span: tuple[int, int] | None = None
    """Earliest and latest stamp, milliseconds."""
    hits: dict[str, Hit] = field(default_factory=dict)
    forward: int = 0
    backward: int = 0
    differences: Counter[int] = field(default_factory=Counter)
    gaps: list[Gap] = field(default_factory=list)
    back_steps: list[Gap] = field(default_factory=list)
    repeats: list[Gap] = field(default_factory=list)
    days: Counter[int] = field(default_factory=Counter)
    """Rows per day since 1970."""
    activity: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((3, 60)))
    """Count, sum and sum of squares of ln(high / low) per minute of the hour."""
    tails: Counter[int] = field(default_factory=Counter)
    """Stamp modulo one minute, milliseconds."""
    text_sorted: bool = True
    zones: set[str] = field(default_factory=set)
    units: set[str] = field(default_factory=set)
    aware: set[bool] = field(default_factory=set)
    any_volume: bool = False
    volume_blocks: list[tuple[int, float]] = field(default_factory=list)
    """(first row, median ln volume) of every thousand rows."""
    stamps: list[npt.NDArray[np.int64]] = field(default_factory=list)
    """Stamp and symbol of every row in one number, for repeats far apart."""
    stamps_dropped: bool = False
    failure: Hit | None = None

    @property
    def step(self) -> int | None:
        """Most frequent distance between neighbours, milliseconds."""
        return min(self.differences, key=lambda ms: (-self.differences[ms], ms)) if self.differences else None

    def hit(self, code: str, rows: pl.DataFrame, value: str) -> None:
        """Count the rows; remember the first place only."""
        if code in self.hits:
            self.hits[code].count += rows.height
        elif rows.height:
            self.hits[code] = Hit(int(rows["row"][0]), value, rows.height)


def scan(table: Table, layout: Layout, reading: StampReading, tz: str | None, ambiguous: str) -> Facts:
    """One pass; a part that cannot be read ends it and is kept as `failure`."""
    facts, carry, row = Facts(), pl.DataFrame(), 0
    try:
        for batch in _batches(table, layout):
            if not batch.height:
                continue
            clean = _clean(batch, layout, reading, tz, ambiguous, row, facts)
            _rules(clean, facts)
            carry = _neighbours(clean, carry, facts)
            _totals(clean, facts)
            row += batch.height
            facts.rows = row
    except FAILURES as error:
        facts.failure = Hit(*(ragged_line(table) or (row, str(error).split("\n", 1)[0])), 1)
    return facts


def _batches(table: Table, layout: Layout) -> Iterator[pl.DataFrame]:
    needed = dict.fromkeys([*layout.roles.values(), *([layout.time] if layout.time else [])])
    yield from table.lazy.select(list(needed)).collect_batches(chunk_size=BATCH_ROWS, maintain_order=True)


def _clean(
    batch: pl.DataFrame,
    layout: Layout,
    reading: StampReading,
    tz: str | None,
    ambiguous: str,
    first_row: int,
    facts: Facts,
) -> pl.DataFrame:
    """Columns row, raw (the stamp as written), ms, symbol and numbers; what cannot be read is null and counted."""
    raw = stamp_column(batch, layout)
    facts.zones.update(zones_in(raw))
    if reading.how == "unix":
        facts.units.update(unix_units(raw))
    parsed = reading.parse(raw)
    facts.aware.update(bool(flag) for flag in parsed["aware"].filter(parsed["ms"].is_not_null()).unique())
    columns: dict[str, Any] = {
        "row": pl.Series(np.arange(first_row, first_row + batch.height)),
        "raw": raw.cast(pl.String, strict=False),
        "ms": parsed["ms"],
        "symbol": _symbols(batch, layout),
    }
    clean = pl.DataFrame(columns)
    facts.hit("bad_stamp", bad := clean.filter(pl.col("ms").is_null()), repr(bad["raw"][0]) if bad.height else "")
    if tz is not None and not parsed["aware"].any():
        clean = clean.with_columns(ms=to_utc(clean["ms"], tz, ambiguous), wall=clean["ms"])
        lost = clean.filter(pl.col("ms").is_null() & pl.col("wall").is_not_null())
        facts.hit("dst_impossible", lost, f"{show(lost['wall'][0])} in {tz}" if lost.height else "")
    if "symbol" in layout.roles:
        facts.hit("missing_symbol", clean.filter(pl.col("symbol") == ""), "empty")
    for role in _NUMBERS:
        if role in layout.roles:
            clean = clean.with_columns(_number(batch[layout.roles[role]], role, clean, facts).alias(role))
    if "volume" not in layout.roles:
        clean = clean.with_columns(volume=pl.lit(0.0))
    return clean


def _symbols(batch: pl.DataFrame, layout: Layout) -> pl.Series:
    if "symbol" not in layout.roles:
        return pl.repeat("", batch.height, eager=True)
    return names_of(batch[layout.roles["symbol"]]).fill_null("")


def _number(column: pl.Series, role: str, clean: pl.DataFrame, facts: Facts) -> pl.Series:
    if not may_hold_numbers(column.dtype):
        facts.hit("wrong_dtype", clean.head(1), f"{role} has the type {column.dtype}")
        return pl.repeat(None, len(column), dtype=pl.Float64, eager=True)
    values = column.cast(pl.Float64, strict=False)
    broken = clean.filter(values.is_null() & column.is_not_null())
    facts.hit(
        "not_a_number",
        broken,
        f"{role} is {column[int(broken['row'][0] - clean['row'][0])]!r}" if broken.height else "",
    )
    # Empty is NaN and unreadable is null from here on, so that each is reported once.
    return pl.select(pl.when(column.is_null()).then(float("nan")).otherwise(values)).to_series()


def _rules(clean: pl.DataFrame, facts: Facts) -> None:
    """Checks that need one row each."""
    # Null compares to nothing, NaN compares as the largest number: so NaN is made null for comparisons.
    o, h, l, c, v = (pl.col(name).fill_nan(None) for name in (*PRICES, "volume"))  # noqa: E741  the usual letters
    rules = {
        "missing_price": pl.any_horizontal(~pl.col(*PRICES).is_finite()),
        "non_positive_price": pl.any_horizontal(pl.col(*PRICES) <= 0),
        "high_below_low": h < l,
        "open_outside": (h >= l) & ((o > h) | (o < l)),
        "close_outside": (h >= l) & ((c > h) | (c < l)),
        "missing_volume": ~pl.col("volume").is_finite(),
        "negative_volume": v < 0,
    }
    if "quote_volume" in clean.columns:
        rules["swapped_volume"] = swapped_volume()
    flags = clean.select(**{code: rule.fill_null(False) for code, rule in rules.items()})
    for code in rules:
        if flags[code].any():
            rows = clean.filter(flags[code])
            facts.hit(code, rows, _quote(rows, ("volume", "quote_volume", "close") if "volume" in code else PRICES))


def _quote(rows: pl.DataFrame, names: tuple[str, ...]) -> str:
    first = rows.row(0, named=True)
    return ", ".join(f"{name} {first[name]:.10g}" for name in names if first.get(name) is not None)


def _neighbours(clean: pl.DataFrame, carry: pl.DataFrame, facts: Facts) -> pl.DataFrame:
    """Checks that need a row and the one before it of the same symbol; returns the last row of each symbol."""
    both = pl.concat([carry.with_columns(old=pl.lit(True)), clean.with_columns(old=pl.lit(False))], how="diagonal")
    pairs = both.with_columns(
        before=pl.col("ms").shift().over("symbol"),
        last_close=pl.col("close").shift().over("symbol"),
        raw_before=pl.col("raw").shift().over("symbol"),
    ).filter(~pl.col("old") & pl.col("before").is_not_null())
    delta = (pairs["ms"] - pairs["before"]).to_numpy()
    facts.forward += int((delta > 0).sum())
    facts.backward += int((delta < 0).sum())
    facts.text_sorted &= bool((pairs["raw"] >= pairs["raw_before"]).all())
    sizes, counts = np.unique(np.abs(delta[(delta != 0) & ~np.isnan(delta)]), return_counts=True)
    for size, count in zip(sizes[:10_000].tolist(), counts[:10_000].tolist(), strict=True):
        facts.differences[int(size)] += count
    _gaps(pairs, delta, facts)
    _moves(pairs, facts)
    _flat(pairs, facts)
    return both.drop("old").group_by("symbol", maintain_order=True).last()


def _gaps(pairs: pl.DataFrame, delta: npt.NDArray[Any], facts: Facts) -> None:
    step = facts.step or 0
    down = facts.backward > facts.forward
    wide = np.flatnonzero((delta < -step) if down else (delta > step))
    back = np.flatnonzero((delta > 0) if down else (delta < 0))
    columns = pairs.select("before", "ms", "row").to_numpy()
    same = np.flatnonzero(delta == 0)
    for where, store in ((wide, facts.gaps), (back, facts.back_steps), (same, facts.repeats)):
        for before, after, row in columns[where[: MAX_GAPS - len(store)]].tolist():
            ends = (after, before) if down else (before, after)
            store.append(Gap(int(ends[0]), int(ends[1]), int(row)))


def _moves(pairs: pl.DataFrame, facts: Facts) -> None:
    """Splits and bad ticks: the price between two bars, and over one bar."""
    prices = ("open", "close", "last_close")
    known = pairs.filter(pl.all_horizontal((pl.col(name) > 0) & pl.col(name).is_finite() for name in prices))
    opened, closed, before = (np.log(known[name].to_numpy()) for name in prices)
    between, over = opened - before, closed - before
    near = np.abs(np.abs(between)[:, None] - _FACTORS).min(axis=1, initial=np.inf) < 0.06
    jump = (np.abs(between) > _JUMP * 0.95) & near
    for code, flag in (("unit_jump", jump), ("large_move", (np.abs(over) > _LARGE) & ~jump)):
        rows = known.filter(pl.Series(flag, dtype=pl.Boolean))
        if rows.height:
            first = rows.row(0, named=True)
            value = f"{show(first['ms'])}: close {first['last_close']:.10g}, then open {first['open']:.10g}"
            facts.hit(code, rows, f"{value}, close {first['close']:.10g}")


def _flat(pairs: pl.DataFrame, facts: Facts) -> None:
    """Runs of bars without any movement; a run cut by the end of a batch counts as two."""
    still = (pl.col("high") == pl.col("low")) & (pl.col("close") == pl.col("last_close"))
    runs = (
        pairs.with_columns(still=still.fill_null(False))
        .with_columns(run=pl.col("still").rle_id().over("symbol"))
        .filter("still")
        .group_by("symbol", "run", maintain_order=True)
        .agg(pl.len(), pl.col("row", "ms", "close").first())
        .filter(pl.col("len") >= FLAT_BARS)
        .sort("row")
    )
    if runs.height:
        first = runs.row(0, named=True)
        facts.hit("flat", runs, f"{first['len']} bars at {first['close']:.10g} from {show(first['ms'])}")


def _totals(clean: pl.DataFrame, facts: Facts) -> None:
    for name in clean["symbol"].unique(maintain_order=True):
        facts.symbols.setdefault(str(name), len(facts.symbols))
    facts.any_volume |= bool((clean["volume"] > 0).any())
    stamped = clean.filter(pl.col("ms").is_not_null())
    if not stamped.height:
        return
    ms = stamped["ms"].to_numpy()
    low, high = int(ms.min()), int(ms.max())
    facts.span = (min(low, facts.span[0]), max(high, facts.span[1])) if facts.span else (low, high)
    if facts.rows + len(ms) <= MAX_STAMPS:
        # Equal keys mean equal stamp and symbol; 2^16 symbols leave room for stamps up to the year 6000.
        symbol = stamped["symbol"].replace_strict(facts.symbols, return_dtype=pl.Int64).to_numpy()
        facts.stamps.append((ms << SYMBOL_BITS) + symbol)
    else:
        facts.stamps_dropped = True
    for value, counter in ((ms // DAY_MS, facts.days), (ms % 60_000, facts.tails)):
        keys, counts = np.unique(value, return_counts=True)
        counter.update(dict(zip(keys[:100_000].tolist(), counts[:100_000].tolist(), strict=True)))
    _activity(stamped, facts)
    _volume_levels(stamped, facts)


def _activity(stamped: pl.DataFrame, facts: Facts) -> None:
    sane = (pl.col("low") > 0) & (pl.col("high") >= pl.col("low")) & pl.col("high").is_finite()
    priced = stamped.filter(sane)
    ranges = np.log(priced["high"].to_numpy()) - np.log(priced["low"].to_numpy())
    minute = (priced["ms"].to_numpy() // 60_000) % 60
    for i, power in enumerate((np.ones_like(ranges), ranges, ranges**2)):
        facts.activity[i] += np.bincount(minute, power, minlength=60)


def _volume_levels(stamped: pl.DataFrame, facts: Facts) -> None:
    block = 1_000
    for start in range(0, stamped.height - block + 1, block):
        part = stamped.slice(start, block)
        traded = part["volume"].filter(part["volume"] > 0)
        if len(traded) > block // 2 and len(facts.volume_blocks) < 100_000:
            facts.volume_blocks.append((int(part["row"][0]), float(np.median(np.log(traded.to_numpy())))))
