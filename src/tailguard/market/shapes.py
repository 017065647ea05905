"""Shapes: files that do not have one row per bar and one named column per figure, recognised and laid out that way.

Recognised by what is in them and said in `Table.notes`: what is a guess is called one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

import polars as pl

from tailguard.errors import DataError
from tailguard.market.headers import FIELD
from tailguard.market.layout import find_stamp, price_roles
from tailguard.market.stamps import recognise
from tailguard.market.tables import FAILURES, Table
from tailguard.market.written_numbers import number_style

LARGEST_WIDE = 50_000_000
"""Cells of a table with a column per symbol: each becomes a row of its own."""
HEAD = 200
_FIELD_FIRST = re.compile(rf"^(?P<field>{FIELD})[ _.\-:/|](?P<symbol>.+)$", re.IGNORECASE)
_FIELD_LAST = re.compile(rf"^(?P<symbol>.+)[ _.\-:/|](?P<field>{FIELD})$", re.IGNORECASE)
_TUPLE = re.compile(r"""^\(['"](.+)['"], ['"](.+)['"]\)$""")
_NOT_SYMBOLS = ("time", "date", "price", "interest", "adj", "quote", "base", "tick", "taker_buy", "usd", "usdt")


def reshaped(table: Table) -> Table:
    """The table with one row per bar and symbol; as it is where it has that shape."""
    try:
        names = table.lazy.collect_schema().names()
        stamp = find_stamp(names)
        if stamp is None:
            return table
        prices = price_roles(names)
        if len(prices) == 4:
            return _from_investing(table, names, stamp)
        pairs = {name: pair for name in names if name != stamp and (pair := _field_and_symbol(name))}
        if any(field == "close" for field, _ in pairs.values()):
            return _wide_fields(table, stamp, pairs)
        if prices in (set(), {"low"}, {"high"}, {"open"}) and _only_numbers(table, names, stamp):
            return _wide_closes(table, stamp, [name for name in names if name != stamp])
    except FAILURES:
        return table  # the reader says what is wrong with it
    return table


def _field_and_symbol(name: str) -> tuple[str, str] | None:
    if parts := _TUPLE.match(name):
        name = "|".join(parts.groups())
    found = _FIELD_FIRST.match(name) or _FIELD_LAST.match(name)
    if found is None or found["symbol"].lower() in _NOT_SYMBOLS:
        return None
    field = found["field"].lower()
    return "adj_close" if field.startswith("adj") else field, found["symbol"]


def _only_numbers(table: Table, names: Sequence[str], stamp: str) -> bool:
    """Whether every column but the stamp holds numbers, and no two are misspelt names of prices."""
    values = [name for name in names if name != stamp]
    known = ("open", "high", "low", "close", "volume")
    near = [name for name in values if name.lower() in known[3:] or get_close_matches(name.lower(), known, 1, 0.7)]
    if not values or len(near) > 1:
        return False
    head = table.lazy.head(HEAD).collect()
    if not head.height or recognise(head[stamp]) is None:
        return False
    style = number_style(head, values, table.separator)
    plain = (
        head
        if style is None
        else head.with_columns(style.plain(pl.col(n)).alias(n) for n in values if head.schema[n] == pl.String)
    )
    empty = [name for name in values if plain[name].null_count() == plain.height]
    numeric = [
        name
        for name in values
        if plain.schema[name].is_numeric()
        or (
            plain.schema[name] == pl.String
            and plain[name].cast(pl.Float64, strict=False).null_count() == plain[name].null_count()
        )
    ]
    return len(numeric) == len(values) and len(empty) < len(values)


def _wide_closes(table: Table, stamp: str, symbols: list[str]) -> Table:
    said = ", ".join(symbols[:4]) + (" ..." if len(symbols) > 4 else "")
    note = f"a guess: {len(symbols)} columns are the closes of as many symbols ({said})"
    return _tall(table, stamp, {symbol: {"close": symbol} for symbol in symbols}, note)


def _wide_fields(table: Table, stamp: str, pairs: dict[str, tuple[str, str]]) -> Table:
    by_symbol: dict[str, dict[str, str]] = {}
    for column, (field, symbol) in pairs.items():
        by_symbol.setdefault(symbol, {}).setdefault(field, column)
    kinds = {frozenset(fields) for fields in by_symbol.values()}
    if len(kinds) > 1:
        least = min(by_symbol, key=lambda symbol: len(by_symbol[symbol]))
        raise DataError(
            f"{table.label}: the symbols do not have the same columns; {least!r} has {sorted(by_symbol[least])} only. "
            "Write the same columns for every symbol."
        )
    said = ", ".join(list(by_symbol)[:4]) + (" ..." if len(by_symbol) > 4 else "")
    note = f"columns per symbol: {', '.join(next(iter(by_symbol.values())))} of {said}"
    return _tall(table, stamp, by_symbol, note)


def _tall(table: Table, stamp: str, by_symbol: dict[str, dict[str, str]], note: str) -> Table:
    """One row per stamp and symbol; where a symbol has no close it has no bar."""
    rows = int(table.lazy.select(pl.len()).collect().item())
    if rows * len(by_symbol) > LARGEST_WIDE:
        raise DataError(
            f"{table.label} holds {rows:,} stamps of {len(by_symbol):,} symbols, over {LARGEST_WIDE:,} bars in a table "
            "with a column per symbol. Write a file per symbol."
        )
    frame = table.lazy.collect()
    parts = [
        frame.select(
            pl.col(stamp).alias("ts"),
            pl.lit(symbol).alias("symbol"),
            *[pl.col(column).alias(field) for field, column in fields.items()],
        )
        for symbol, fields in by_symbol.items()
    ]
    together = pl.concat(parts, how="vertical_relaxed")
    has_bar = pl.col("close").is_not_null()
    if together.schema["close"] == pl.String:
        has_bar &= ~pl.col("close").str.strip_chars().str.to_lowercase().is_in(["", "nan", "null", "."])
    elif together.schema["close"].is_float():
        has_bar &= pl.col("close").is_not_nan()
    return replace(table, lazy=together.filter(has_bar).lazy(), text=False, notes=(*table.notes, note))


def _from_investing(table: Table, names: Sequence[str], stamp: str) -> Table:
    """Exports of investing.com and nasdaq.com run from new to old; only these are turned round unasked."""
    plain = {re.sub(r"[^a-z0-9]", "", name.lower()) for name in names}
    if not ({"price", "change"} <= plain or "closelast" in plain):
        return table
    frame = table.lazy.collect()
    reading = recognise(frame[stamp])
    if reading is None or frame.height < 2 or not (reading.parse(frame[stamp])["ms"].diff().drop_nulls() < 0).all():
        return table
    note = "rows run from new to old, as this source writes them: turned round"
    return replace(table, lazy=frame.reverse().lazy(), text=False, notes=(*table.notes, note))
