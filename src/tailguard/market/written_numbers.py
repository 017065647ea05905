"""Numbers as exports write them: "3,442.87M", "$189.95", "1.234,56". Read by one rule per file, which is said aloud."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import polars as pl

NO_NUMBER = ("-", ".", "null", "NULL", "n/a", "N/A")
"""What exports write where they have none."""
_MONEY = r"^([+-]?)[$€£¥]"
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_GROUPS = {".": r"^[+-]?\d{1,3}(,\d{3})+(\.\d+)?$", ",": r"^[+-]?\d{1,3}(\.\d{3})+(,\d+)?$"}


@dataclass(frozen=True)
class NumberStyle:
    """How the numbers of a file are written."""

    decimal: str
    """The mark before the decimals: a point or a comma."""
    example: str
    """The first cell that is no number as it stands."""

    @property
    def note(self) -> str:
        """For people: what was taken for what."""
        value = pl.select(self.plain(pl.lit(self.example, dtype=pl.String))).item()
        return f"numbers: {self.example!r} is read as {float(value):.15g}" if value is not None else ""

    def plain(self, cells: pl.Expr) -> pl.Expr:
        """The cells as text that every reader takes for a number; cells that are none stay as they are."""
        bare = cells.str.strip_chars().str.replace(_MONEY, "${1}")
        unit = bare.str.extract(r"\d([KMBT])$", 1)
        body = bare.str.replace(r"[KMBT]$", "")
        grouped = body.str.contains(_GROUPS[self.decimal])
        body = (
            pl.when(grouped)
            .then(body.str.replace_all("," if self.decimal == "." else ".", "", literal=True))
            .otherwise(body)
        )
        if self.decimal == ",":
            simple = body.str.contains(r"^[+-]?\d*(,\d+)?$")
            body = pl.when(simple).then(body.str.replace(",", ".", literal=True)).otherwise(None)
        value = body.cast(pl.Float64, strict=False) * unit.replace_strict(_UNITS, default=1.0, return_dtype=pl.Float64)
        missing = bare.is_in(NO_NUMBER)
        usual = cells.cast(pl.Float64, strict=False) if self.decimal == "." else pl.lit(None, dtype=pl.Float64)
        number = pl.coalesce(usual, value)
        return pl.when(missing).then(None).when(number.is_null()).then(cells).otherwise(number.cast(pl.String))


def number_style(frame: pl.DataFrame, names: Iterable[str], separator: str = ",") -> NumberStyle | None:
    """How the numbers of these columns are written, where that is not the usual way; None where it is."""
    texts = [frame[name].drop_nulls() for name in names if frame.schema[name] == pl.String]
    if not texts:
        return None
    cells = pl.concat([column.rename("cell") for column in texts]).str.strip_chars()
    odd = cells.filter(cells.cast(pl.Float64, strict=False).is_null() & (cells != ""))
    if not len(odd):
        return None
    bare = odd.str.replace(_MONEY, "${1}").str.replace(r"[KMBT]$", "")
    european = bare.str.contains(r"^[+-]?(\d+|\d{1,3}(\.\d{3})+),\d+$") & ~bare.str.contains(_GROUPS["."])
    pointed = bare.str.contains(r",\d{3}\.\d+$")
    either = bare.str.contains(r"^[+-]?\d{1,3},\d{3}$")
    plain_points = cells.str.contains(r"\.\d+$") & ~cells.str.contains(r"^[+-]?\d{1,3}(\.\d{3})+(,\d+)?$")
    comma = european.any() or (separator in ";\t" and either.any() and not plain_points.any())
    style = NumberStyle("," if comma and not pointed.any() else ".", "")
    readable = odd.filter(odd.is_in(NO_NUMBER) | _reads(odd, style))
    return NumberStyle(style.decimal, str(readable[0])) if len(readable) else None


def _reads(cells: pl.Series, style: NumberStyle) -> pl.Series:
    plain = pl.select(style.plain(pl.lit(cells))).to_series()
    return plain.cast(pl.Float64, strict=False).is_not_null()
