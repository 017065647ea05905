"""The report of a data check, and its plain-text form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tailguard.market.problems import PROBLEMS, Severity


@dataclass(frozen=True)
class Finding:
    """One kind of problem in one file: the first place, its value, and how often it occurs."""

    code: str
    row: int | None
    value: str
    count: int
    severity: Severity
    meaning: str
    fix: str


def finding(code: str, row: int | None = None, value: str = "", count: int = 1, fix: str | None = None) -> Finding:
    """A finding of a declared kind."""
    problem = PROBLEMS[code]
    return Finding(code, row, value, count, problem.severity, problem.meaning, fix or problem.fix)


@dataclass(frozen=True)
class DataReport:
    """Everything a check saw. `ok` when no finding is an error."""

    label: str
    rows: int
    symbols: tuple[str, ...]
    first: str
    last: str
    step_s: float | None
    bars_per_year: float | None
    taken: tuple[str, ...]
    findings: tuple[Finding, ...]
    calendar: str
    header_lines: int | None
    """Lines before the first data row of a text file; None for other sources."""

    @property
    def ok(self) -> bool:
        """True when nothing has to be corrected or declared before loading."""
        return not any(item.severity == "error" for item in self.findings)

    @property
    def exit_code(self) -> int:
        """0 fine, 1 a check failed."""
        return 0 if self.ok else 1

    def codes(self, severity: Severity | None = None) -> tuple[str, ...]:
        """Codes found, worst first."""
        return tuple(item.code for item in self.findings if severity is None or item.severity == severity)


def ranked(findings: Sequence[Finding], accept: Sequence[str]) -> tuple[Finding, ...]:
    """Worst first, in the order of their rows; accepted kinds become notes."""
    order = {"error": 0, "warning": 1, "note": 2}
    items = [replace(item, severity="note") if item.code in accept else item for item in findings]
    return tuple(sorted(items, key=lambda item: (order[item.severity], item.row is None, item.row or 0)))


def render(report: DataReport) -> str:
    """The report as plain text, for a terminal."""
    lines = [f"{report.label}: {report.rows:,} rows, {_symbols(report.symbols)}"]
    if report.first:
        lines.append(f"  {report.first} to {report.last}, " + _step(report))
    lines += [f"  {note}" for note in report.taken]
    for item in report.findings:
        times = f", {item.count:,} in all" if item.count > 1 else ""
        where = _place(item.row, report.header_lines)
        lines += ["", f"{item.severity:<8} {item.code}{where}{times}" + (f": {item.value}" if item.value else "")]
        lines += [f"         {item.meaning}", f"         Fix: {item.fix}"]
    if report.calendar:
        lines += ["", report.calendar]
    errors, warnings = (len(report.codes(severity)) for severity in ("error", "warning"))
    verdict = "fine" if report.ok else "not fit to train on as it is"
    return "\n".join([*lines, "", f"{verdict}: {errors} errors, {warnings} warnings"])


def _symbols(symbols: tuple[str, ...]) -> str:
    return ", ".join(symbols[:4]) + (f" and {len(symbols) - 4} more" if len(symbols) > 4 else "")


def _step(report: DataReport) -> str:
    if report.step_s is None:
        return "bar length unknown"
    rate = f", {report.bars_per_year:,.0f} bars per year" if report.bars_per_year else ""
    return f"bars of {_duration(report.step_s)}{rate}"


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:g} s"


def _place(row: int | None, header_lines: int | None) -> str:
    if row is None:
        return ""
    return f" at row {row}" if header_lines is None else f" at line {row + 1 + header_lines}"
