"""Options that several commands share: how files of bars are to be read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Repairs = Annotated[
    list[str] | None,
    typer.Option(
        "--repair", help="sort, duplicates, missing, missing_volume, swapped_volume or adjust; may be repeated."
    ),
]
ColumnNames = Annotated[
    str | None,
    typer.Option("--columns", help="Names of a file without header, by commas; or which column is what: close=last."),
]
Ambiguous = Annotated[
    str | None, typer.Option(help="Which of two equal times is meant when clocks go back: earliest or latest.")
]
OneSymbol = Annotated[
    str | None, typer.Option(help="Use this symbol of --data only, or name the one of a file that does not.")
]


def bars_of(
    data: list[Path] | None,
    *,
    columns: str | list[str] | None = None,
    repair: list[str] | None = None,
    **said: str | None,
) -> dict[str, Any]:
    """The settings that --data and the options about reading it stand for."""
    wanted = {
        "files": [str(file.resolve()) for file in data or []] or None,
        "columns": (columns.split(",") if isinstance(columns, str) else columns) or None,
        "repair": repair or None,
        **said,
    }
    named = {name: value for name, value in wanted.items() if value is not None}
    return {"data": named} if named else {}
