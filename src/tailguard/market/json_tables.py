"""JSON files of bars: rows as ccxt, freqtrade and Binance's API give them, lists of objects, and what pandas writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from tailguard.errors import DataError
from tailguard.market.headers import KLINES
from tailguard.market.layout import USUAL_ORDER

MEMORY_PER_BYTE = 16
"""What parsed JSON takes, at most about, of memory for each byte of text."""


def json_table(text: bytes, path: Path) -> pl.DataFrame:
    """The table that JSON text holds; DataError says which forms are read."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:
        what = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"{path} is not valid JSON: {what}. Download it again.") from None
    if isinstance(parsed, Mapping) and {"columns", "data"} <= set(parsed):
        return _split(parsed, path)
    if isinstance(parsed, list) and parsed and all(isinstance(row, list) for row in parsed):
        return rows_table(parsed, str(path))
    if isinstance(parsed, list) and parsed and all(isinstance(row, dict) for row in parsed):
        return pl.DataFrame(parsed, infer_schema_length=None, strict=False)
    if isinstance(parsed, dict) and parsed and all(isinstance(column, dict) for column in parsed.values()):
        index = list(next(iter(parsed.values())))
        return pl.DataFrame(
            {"index": index, **{name: [column.get(key) for key in index] for name, column in parsed.items()}},
            strict=False,
        )
    if isinstance(parsed, dict) and parsed and all(isinstance(column, list) for column in parsed.values()):
        return pl.DataFrame(parsed, strict=False)
    raise DataError(
        f"{path} holds JSON of another form than bars: expected rows [[ms, open, high, low, close, volume], ...] as of "
        "ccxt and freqtrade, or a list of objects with names."
    )


def rows_table(rows: Sequence[Any], label: str) -> pl.DataFrame:
    """Rows of ccxt (6 values) or of Binance's klines (12 values)."""
    names = KLINES if isinstance(rows[0], Sequence) and len(rows[0]) == len(KLINES) else USUAL_ORDER
    for row, values in enumerate(rows):
        if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != len(names):
            raise DataError(
                f"{label}: row {row} is {str(values)[:80]}; ccxt rows are "
                "[milliseconds, open, high, low, close, volume]."
            )
    return pl.DataFrame({name: [values[i] for values in rows] for i, name in enumerate(names)}, strict=False)


def _split(parsed: Mapping[str, Any], path: Path) -> pl.DataFrame:
    names, rows = [str(name) for name in parsed["columns"]], parsed["data"]
    index = parsed.get("index", list(range(len(rows))))
    if any(not isinstance(row, list) or len(row) != len(names) for row in rows) or len(index) != len(rows):
        raise DataError(f"{path}: rows, columns and index of the JSON do not fit together. Write it again.")
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    return pl.DataFrame({**({} if "index" in columns else {"index": index}), **columns}, strict=False)
