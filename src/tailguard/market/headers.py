"""Headers of text files: none at all, or two levels of columns as pandas writes them."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence

KLINES = (
    *("open_time", "open", "high", "low", "close", "volume", "close_time", "quote_volume", "count"),
    *("taker_buy_volume", "taker_buy_quote_volume", "ignore"),
)
METATRADER = ("date", "time", "open", "high", "low", "close", "volume")
FIELD = r"open|high|low|close|volume|adj(?:usted)?[ _.]?close|adjusted"
_LEVELS = ("price", "ticker", "attributes", "tickers", "symbol", "symbols", "")


def cells_of(line: str, separator: str) -> list[str]:
    """The fields of one line of text."""
    try:
        return next(csv.reader([line], delimiter=separator), [])
    except csv.Error:  # a stray carriage return, or a cell beyond what csv reads: the table's own reader says more
        return line.split(separator)


def names_without_header(rows: Sequence[Sequence[str]]) -> tuple[str, tuple[str, ...]] | None:
    """Source and column names of a file without header whose rows can only be those of one known source."""
    if rows and all(len(row) == len(KLINES) for row in rows):
        numbers = [_numbers(row) for row in rows]
        if all(row[6] > row[0] > 1e8 and _is_bar(row[1:5]) for row in numbers):
            return "Binance klines", KLINES
    if rows and all(len(row) == len(METATRADER) for row in rows):
        dated = all(re.match(r"^\d{4}\.\d\d\.\d\d$", row[0]) and re.match(r"^\d\d:\d\d", row[1]) for row in rows)
        if dated and all(_is_bar(_numbers(row[2:6])) for row in rows):
            return "MetaTrader", METATRADER
    return None


def column_levels(rows: Sequence[Sequence[str]]) -> tuple[int, tuple[str, ...]] | None:
    """Number of header lines and names FIELD|SYMBOL of a file with two levels of columns, as pandas writes frames of
    yfinance."""
    if len(rows) < 3 or len({len(row) for row in rows[:3]}) > 1 or len(rows[0]) < 2:
        return None
    first, second, third = rows[:3]
    if not all(row[0].strip().lower() in _LEVELS for row in (first, second)):
        return None
    if not any(all(re.fullmatch(FIELD, cell.strip(), re.IGNORECASE) for cell in row[1:]) for row in (first, second)):
        return None
    named = bool(third[0]) and not any(third[1:])
    return 2 + named, (
        third[0] if named else "index",
        *(f"{a}|{b}" for a, b in zip(first[1:], second[1:], strict=True)),
    )


def _numbers(cells: Sequence[str]) -> list[float]:
    values = []
    for cell in cells:
        try:
            values.append(float(cell))
        except ValueError:
            values.append(float("nan"))
    return values


def _is_bar(prices: Sequence[float]) -> bool:
    o, h, l, c = prices  # noqa: E741  the usual letters
    return l <= min(o, c) and max(o, c) <= h
