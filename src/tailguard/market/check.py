"""The data check: everything that is wrong with a file, not only the first thing, and how to put it right."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import polars as pl

from tailguard.errors import DataError, did_you_mean
from tailguard.market.bars import observed_rate
from tailguard.market.clocks import calendar_view, clock_findings
from tailguard.market.findings import DataReport, Finding, finding, ranked, render
from tailguard.market.layout import USUAL_ORDER, Layout
from tailguard.market.problems import PROBLEMS
from tailguard.market.scan import SYMBOL_BITS, Facts, scan
from tailguard.market.shapes import reshaped
from tailguard.market.sources import Stamp, arranged, stamp_column
from tailguard.market.stamps import StampReading, recognise, require_zone, show
from tailguard.market.tables import Columns, Table, collect, named_panics, no_header_fix, open_source, ragged_line

__all__ = ["DataReport", "check_file", "render"]


@named_panics
def check_file(
    source: Any,
    *,
    stamp: Stamp | None = None,
    tz: str | None = None,
    columns: Columns | None = None,
    ambiguous: Literal["raise", "earliest", "latest"] = "raise",
    accept: Collection[str] = (),
) -> DataReport:
    """Read a file (or anything `load_bars` takes) in one pass and report.

    stamp:  None when it is not known whether stamps are opens or closes: then the check looks for closes
    accept: codes that are known and meant; they become notes
    The other arguments are those of `load_bars`. DataError only when there is nothing to check: no file, no stamps.
    """
    for code in accept:
        if code not in PROBLEMS:
            raise DataError(f"accept has {code!r}.{did_you_mean(code, PROBLEMS)} Codes: {', '.join(PROBLEMS)}.")
    if tz is not None:
        require_zone(tz)
    table = open_source(source, columns)
    if columns is None:
        table = reshaped(table)
    early: list[Finding] = []
    if table.first_row_is_data:
        early.append(finding("no_header", 0, fix=no_header_fix(table)))
        table = _usual_names(table)
    try:
        head = collect(replace(table, lazy=table.lazy.head(10_000)))
    except DataError as error:
        row, value = ragged_line(table) or (0, str(error))
        return _report(table, Facts(), [*early, finding("unreadable", row, value)], [], "", accept)
    if not head.height:
        return _report(table, Facts(), [finding("empty")], [], "", accept)
    table, head, layout = arranged(table, head, columns)
    reading = recognise(stamp_column(head, layout))
    if reading is not None and reading.ambiguous_with:
        sparse = collect(replace(table, lazy=table.lazy.gather_every(1_009)))
        reading = recognise(pl.concat([stamp_column(head, layout), stamp_column(sparse, layout)]))
    if reading is None:
        raise DataError(
            f"{table.label}: the column {layout.roles['ts']!r} does not hold stamps "
            f"({stamp_column(head, layout).head(3).to_list()}). Name another with columns={{'ts': ...}}."
        )
    if reading.ambiguous_with:
        early.append(finding("day_or_month", 0, repr(stamp_column(head, layout)[0])))
    facts = scan(table, layout, reading, tz, ambiguous)
    findings = [*early, *_file_findings(facts), *_stamp_findings(facts, layout, reading, tz, stamp)]
    taken = [*table.notes, f"stamps: {reading.label}" + (f" in {tz}" if tz else "")]
    return _report(table, facts, findings, taken, calendar_view(facts), accept)


def _usual_names(table: Table) -> Table:
    names = table.lazy.collect_schema().names()
    usual = dict(zip(names, USUAL_ORDER, strict=False))
    return replace(table, lazy=table.lazy.rename(usual))


def _file_findings(facts: Facts) -> list[Finding]:
    """What single rows and neighbours showed."""
    found = [finding(code, hit.row, hit.value, hit.count) for code, hit in facts.hits.items()]
    if facts.failure:
        found.append(finding("unreadable", facts.failure.row, facts.failure.value))
    if facts.rows == 1:
        found.append(finding("one_row", 0))
    if facts.rows and not facts.any_volume:
        found.append(finding("no_volume"))
    levels = facts.volume_blocks
    jumps = [(row, abs(level - before)) for (_, before), (row, level) in pairwise(levels)]
    abrupt = [(row, size) for row, size in jumps if size > np.log(1_000)]
    if abrupt:
        found.append(finding("volume_jump", abrupt[0][0], f"{np.exp(abrupt[0][1]):,.0f} times", len(abrupt)))
    return found


def _stamp_findings(
    facts: Facts, layout: Layout, reading: StampReading, tz: str | None, stamp: Stamp | None
) -> list[Finding]:
    found = []
    named = sorted(zone or "none" for zone in facts.zones)
    if len(facts.units) > 1:
        found.append(finding("mixed_units", 0, " and ".join(sorted(facts.units))))
    if facts.aware == {True, False}:
        found.append(finding("mixed_zone", 0, ", ".join(named)))
    elif len(named) > 1 and facts.aware == {True}:
        found.append(finding("several_offsets", 0, ", ".join(named)))
    naive = facts.aware == {False} and tz is None
    return [*found, *clock_findings(facts, naive, tz, stamp, layout.stamped_at_close, reading)]


def _report(
    table: Table, facts: Facts, findings: list[Finding], taken: list[str], calendar: str, accept: Collection[str]
) -> DataReport:
    first, last = facts.span or (None, None)
    return DataReport(
        label=table.label,
        rows=facts.rows,
        symbols=tuple(name or table.name for name in facts.symbols),
        first=show(first) if first is not None else "",
        last=show(last) if last is not None else "",
        step_s=facts.step / 1000 if facts.step else None,
        bars_per_year=_rate(facts),
        taken=tuple(taken),
        findings=ranked(findings, tuple(accept)),
        calendar=calendar,
        header_lines=int(table.header) if table.text else None,
    )


def _rate(facts: Facts) -> float | None:
    """The same figure as `Bars.bars_per_year`; None when the file was too long to keep its stamps."""
    if facts.step is None or not facts.stamps or facts.stamps_dropped:
        return None
    stamps = np.concatenate(facts.stamps)
    stamps >>= SYMBOL_BITS
    if facts.backward or len(facts.symbols) > 1:
        stamps = np.unique(stamps)
    return observed_rate(stamps.astype("datetime64[ms]"), np.timedelta64(facts.step, "ms"))
