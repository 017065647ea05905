"""Tables: files, frames and rows opened as lazy frames. Nothing in them is trusted, and nothing is executed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import polars as pl
from polars.exceptions import PanicException, PolarsError

from tailguard.errors import DataError
from tailguard.files import open_regular, physical_memory
from tailguard.market.headers import cells_of, column_levels, names_without_header
from tailguard.market.json_tables import MEMORY_PER_BYTE, json_table, rows_table
from tailguard.market.layout import USUAL_ORDER
from tailguard.market.unpacked import decoded_text, refuse_bomb, unpacked_bytes

P = ParamSpec("P")
Result = TypeVar("Result")
Columns = Sequence[str] | Mapping[str, str | int]

FAILURES = (PolarsError, PanicException, OSError, ValueError, MemoryError)
"""What polars raises for bytes that it cannot read; a panic of its own code is not even an `Exception`."""
_TEXT = (".csv", ".txt", ".tsv", ".gz", ".zst", ".zip")
_JSON = (".json", ".json.gz", ".json.zip")
_PARQUET = (".parquet", ".pq")
_FEATHER = (".feather", ".arrow", ".ipc")


@dataclass(frozen=True)
class Table:
    """A source that is open but not read: a lazy frame, all text when it comes from a text file."""

    lazy: pl.LazyFrame
    label: str
    name: str = "asset"
    """Symbol of bars that do not name theirs."""
    text: bool = False
    header: bool = True
    first_row_is_data: bool = False
    """A text file without `columns` whose first line holds numbers: its names are missing, not odd."""
    notes: tuple[str, ...] = ()
    separator: str = ","
    content: bytes | None = None
    """UTF-8 text of a file that is packed or written in another encoding."""

    def place(self, row: int) -> str:
        """Where a data row is, in words a user can look up."""
        return f"line {row + 1 + self.header}" if self.text else f"row {row}"


def named_panics(read: Callable[P, Result]) -> Callable[P, Result]:
    """A reader whose errors are all of this package: polars stops with errors of its own on bytes it did not expect."""

    @wraps(read)
    def reads(*args: P.args, **options: P.kwargs) -> Result:
        try:
            return read(*args, **options)
        except (PanicException, PolarsError, OverflowError, MemoryError) as error:
            source = args[0] if args and isinstance(args[0], str | Path) else "The source"
            raise DataError(
                f"{source} cannot be read: {_first_line(error)}. Write it anew from where it came."
            ) from None

    return reads


def open_source(source: Any, columns: Columns | None = None) -> Table:
    """Open without reading; nothing of the content is trusted yet."""
    if isinstance(source, str | Path):
        return _open_file(Path(source), columns)
    if isinstance(source, pl.DataFrame | pl.LazyFrame):
        return Table(source.lazy(), "the polars frame")
    if hasattr(source, "iloc") and hasattr(source, "columns"):
        return Table(_from_pandas(source).lazy(), "the pandas frame")
    if hasattr(source, "__arrow_c_stream__") or isinstance(source, Mapping):
        return Table(pl.DataFrame(source).lazy(), "the table")
    if isinstance(source, Sequence) and not isinstance(source, bytes):
        return _open_rows(source)
    raise DataError(
        f"Cannot read bars from {type(source).__name__}. Pass a path to CSV, parquet or feather, a pandas or polars "
        f"frame, a mapping of columns, or ccxt rows [[ms, open, high, low, close, volume], ...]."
    )


def no_header_fix(table: Table) -> str:
    """The call that works for a file without header."""
    names = list(USUAL_ORDER[: len(table.lazy.collect_schema().names())])
    return f"Name the columns in their order, for example columns={names}."


def collect(table: Table) -> pl.DataFrame:
    """The whole table in memory."""
    try:
        return table.lazy.collect()
    except FAILURES as error:
        raise DataError(
            f"{table.label} cannot be read: {_first_line(error)}. The file is damaged or of another format."
        ) from None


def ragged_line(table: Table) -> tuple[int, str] | None:
    """Row and text of the first line with another number of fields than the header, if there is one."""
    if not table.text:
        return None
    fields = len(table.lazy.collect_schema().names())
    for start, batch in _lines(Path(table.label) if table.content is None else table.content):
        odd = (batch.str.count_matches(table.separator, literal=True) != fields - 1).arg_true()
        if len(odd):
            row = start + int(odd[0]) - table.header
            return row, f"{fields} fields are expected in {str(batch[int(odd[0])])[:80]!r}"
    return None


def _lines(path: Path | bytes) -> Iterator[tuple[int, pl.Series]]:
    """Lines of a text file in batches, with the number of the first; blank lines are left out."""
    lazy = pl.scan_csv(
        path, has_header=False, separator="\x01", quote_char=None, infer_schema=False, encoding="utf8-lossy", glob=False
    )
    start = 0
    for batch in lazy.collect_batches(maintain_order=True):
        yield start, batch.to_series()
        start += batch.height


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0].rstrip(".")


def _open_file(path: Path, columns: Columns | None) -> Table:
    with open_regular(path, DataError) as file:
        if not file.read(1):
            raise DataError(f"{path} is empty (0 bytes).")
    suffix = path.suffix.lower()
    if path.name.lower().endswith(_JSON):
        return Table(json_table(unpacked_bytes(path, MEMORY_PER_BYTE), path).lazy(), str(path), path.name.split(".")[0])
    if suffix in _TEXT:
        refuse_bomb(path)
        return _open_text(path, columns)
    if suffix not in (*_PARQUET, *_FEATHER):
        raise DataError(
            f"{path.name}: {suffix or 'no suffix'} is not read. "
            f"Use {', '.join((*_TEXT, '.json', *_PARQUET, *_FEATHER))}."
        )
    try:
        lazy = pl.scan_parquet(path, glob=False) if suffix in _PARQUET else pl.scan_ipc(path, glob=False)
        refuse_more_than_memory(lazy, path)
    except FAILURES as error:
        raise DataError(f"{path} cannot be read as {suffix[1:]}: {_first_line(error)}. The file is damaged.") from None
    return Table(lazy, str(path), path.stem)


def refuse_more_than_memory(lazy: pl.LazyFrame, path: Path, available: int | None = None) -> None:
    """Columns of one value take no room in a file and all of it in memory: count before they are unpacked."""
    n_rows, n_columns = int(lazy.select(pl.len()).collect().item()), len(lazy.collect_schema())
    if 8 * n_rows * n_columns > (physical_memory() if available is None else available):
        raise DataError(
            f"{path} has {n_rows:,} rows of {n_columns} columns, which are more than the memory of this machine. Split "
            "the file."
        )


def _open_text(path: Path, columns: Columns | None) -> Table:
    """Text stays text: numbers and stamps are parsed where a failure can name its row."""
    named = list(columns) if columns is not None and not isinstance(columns, Mapping) else None
    content = decoded_text(path)
    source = path if content is None else content
    usual: dict[str, Any] = {"infer_schema": False, "encoding": "utf8-lossy", "glob": False}
    try:
        head = pl.read_csv(
            source, has_header=False, separator="\x01", quote_char=None, n_rows=5, infer_schema=False, glob=False
        )
        lines = [str(line) for line in head.to_series().to_list() if line]
        separator = max(";\t|,", key=lambda mark: min((line.count(mark) for line in lines), default=0))
        rows = [cells_of(line, separator) for line in lines]
        notes = [] if separator == "," else [f"separator: {separator!r}"]
        header, skipped = named is None, 0
        known = names_without_header(rows) if named is None else None
        levels = column_levels(rows) if named is None else None
        if known is not None:
            header, named = False, list(known[1])
            notes.append(f"no header: the columns are those of {known[0]}, as its rows show ({', '.join(named)})")
        elif levels is not None:
            header, skipped, named = False, levels[0], list(levels[1])
        lazy = pl.scan_csv(
            source, separator=separator, has_header=header, skip_rows=skipped, new_columns=named, **usual
        )
        names = lazy.collect_schema().names()
    except FAILURES as error:
        raise DataError(f"{path} cannot be read as text: {_first_line(error)}.") from None
    first_row_is_data = header and sum(_is_number(name) for name in names) >= 3
    if first_row_is_data:
        lazy = pl.scan_csv(source, separator=separator, has_header=False, **usual)
        header = False
    return Table(
        lazy, str(path), path.name.split(".")[0], True, header, first_row_is_data, tuple(notes), separator, content
    )


def _is_number(text: str) -> bool:
    try:
        float(text.split("_duplicated_")[0])
    except ValueError:
        return False
    return True


def _open_rows(rows: Sequence[Any]) -> Table:
    """ccxt's fetch_ohlcv: [[ms, open, high, low, close, volume], ...]; or Binance's klines of twelve values."""
    if not rows:
        raise DataError("There is no row; fetch_ohlcv returned nothing for this span.")
    return Table(rows_table(rows, "the ccxt rows").lazy(), "the ccxt rows")


def _from_pandas(frame: Any) -> pl.DataFrame:
    """Column by column through numpy, so that neither pandas nor pyarrow has to be installed with this package."""
    if getattr(frame.columns, "nlevels", 1) == 2 and getattr(frame.index.dtype, "kind", "") == "M":
        stamps = frame.index.to_series().rename("index")
        values = {"|".join(map(str, name)): _from_pandas_column(frame[name]) for name in frame.columns}
        return pl.DataFrame({"index": _from_pandas_column(stamps), **values})
    if getattr(frame.columns, "nlevels", 1) > 1:
        raise DataError(
            "The pandas frame has several levels of columns. Use frame.stack(level=1) to give one row per symbol."
        )
    if getattr(frame.index.dtype, "kind", "") == "M" or getattr(frame.index, "nlevels", 1) > 1:
        frame = frame.reset_index()
    return pl.DataFrame({str(name): _from_pandas_column(frame[name]) for name in frame.columns})


def _from_pandas_column(column: Any) -> pl.Series:
    if getattr(column.dtype, "tz", None) is not None:
        naive = column.dt.tz_convert("UTC").dt.tz_localize(None).to_numpy().astype("datetime64[ms]")
        return pl.Series(naive).dt.replace_time_zone("UTC")
    if column.dtype.kind in "iufbM":
        values = column.to_numpy()
        return pl.Series(values.astype("datetime64[ms]") if column.dtype.kind == "M" else values)
    values = [None if value != value else value for value in column.to_numpy(dtype=object).tolist()]
    return pl.Series(values, strict=False)
