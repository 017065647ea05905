"""Real market bars for tests. They are never part of the project: where they are not there, a test skips."""

from __future__ import annotations

import os
from pathlib import Path

import polars as pl
import pytest

COLUMNS = ["ts", "symbol", "open", "high", "low", "close", "volume"]


def data_folder() -> Path | None:
    """`TAILGUARD_TEST_DATA`, or the folder shared/data beside the project or above it."""
    named = os.environ.get("TAILGUARD_TEST_DATA")
    places = [Path(named)] if named else [place / "shared" / "data" for place in Path(__file__).resolve().parents]
    return next((place for place in places if place.is_dir()), None)


def real_frame(*names: str, n_bars: int | None = None) -> pl.DataFrame:
    """The first bars of real files, side by side."""
    folder = data_folder()
    files = [(folder or Path()) / f"{name}.parquet" for name in names]
    if folder is None or not all(file.is_file() for file in files):
        pytest.skip(f"real bars {', '.join(names)} are not there; TAILGUARD_TEST_DATA names their folder")
    frame = pl.concat([pl.read_parquet(file).select(COLUMNS) for file in files]).sort("ts", maintain_order=True)
    if n_bars is None:
        return frame
    stamps = frame["ts"].unique().sort()
    return frame.filter(pl.col("ts") <= stamps[min(n_bars, len(stamps)) - 1])
