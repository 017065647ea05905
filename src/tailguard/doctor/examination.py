"""The examination: every check on one patient, a verdict per line, and the whole as text, JSON or a page."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from tailguard.doctor import environment, learner, market, prices, speed
from tailguard.doctor.checks import Check, Verdict, sick
from tailguard.doctor.patient import Patient

SLOW = ("market/planted_signal", "market/permuted_returns")
"""Checks that train an agent: about a minute each."""

CHECKS: tuple[Check, ...] = (
    *environment.CHECKS,
    *prices.CHECKS,
    *learner.CHECKS,
    *market.CHECKS,
    *speed.CHECKS,
)


@dataclass(frozen=True)
class Line:
    """One check, its verdict and how long it took."""

    name: str
    question: str
    verdict: Verdict
    seconds: float


@dataclass(frozen=True)
class Examination:
    """All lines of one patient."""

    patient: str
    lines: tuple[Line, ...]

    @property
    def failures(self) -> list[Line]:
        return [line for line in self.lines if line.verdict.status == "fail"]

    def line(self, name: str) -> Line:
        """The line of that name."""
        return next(line for line in self.lines if line.name == name)

    def to_json(self) -> str:
        """For programs: who, the counts, the names of what failed, and every line."""
        told = {"patient": self.patient, **counts(self), "failures": [line.name for line in self.failures]}
        return json.dumps({**told, "lines": [asdict(line) for line in self.lines]}, indent=2)

    def to_html(self) -> str:
        """One page, what failed first; no script, no network, and everything that comes from outside is escaped."""
        rows = "".join(
            f"<tr class='{line.verdict.status.replace('/', '')}'><td>{line.verdict.status}</td>"
            f"<td><b>{html.escape(line.question)}</b><br><code>{html.escape(line.name)}</code></td>"
            f"<td>{html.escape(line.verdict.figure)}<br><i>{html.escape(line.verdict.advice)}</i></td></tr>"
            for line in sorted(self.lines, key=lambda line: line.verdict.status != "fail")
        )
        return PAGE.format(patient=html.escape(self.patient), summary=html.escape(summary(self)), rows=rows)


PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Doctor: {patient}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; width: 100% }}
td {{ border-top: 1px solid #8886; padding: .4rem .6rem; vertical-align: top }}
.pass td:first-child {{ color: #2a7 }} .fail td:first-child {{ color: #d33; font-weight: bold }} .na {{ opacity: .6 }}
</style></head><body><h1>Doctor: {patient}</h1><p>{summary}</p><table>{rows}</table></body></html>
"""


def examine(
    patient: Patient,
    checks: Iterable[Check] = CHECKS,
    told: Callable[[Line], None] = lambda line: None,
) -> Examination:
    """Run the checks one by one; one that breaks is a failure with the error as its figure, and the others go on."""
    lines = []
    for check in checks:
        began = time.perf_counter()
        try:
            verdict = check.examine(patient)
        except Exception as error:
            verdict = sick(f"{type(error).__name__}: {error}", "The check could not be finished: the error says why.")
        lines.append(Line(check.name, check.question, verdict, time.perf_counter() - began))
        told(lines[-1])
    return Examination(patient.name, tuple(lines))


def chosen(quick: bool = False, only: str | None = None) -> tuple[Check, ...]:
    """All checks, or those without training, or those whose name contains a text."""
    found = [check for check in CHECKS if not (quick and check.name in SLOW)]
    return tuple(check for check in found if only is None or only in check.name)


def counts(examination: Examination) -> dict[str, int]:
    """How many lines passed, failed, and do not apply."""
    statuses = [line.verdict.status for line in examination.lines]
    words = {"passed": "pass", "failed": "fail", "not_applicable": "n/a"}
    return {word: statuses.count(status) for word, status in words.items()}  # type: ignore[arg-type]


def summary(examination: Examination) -> str:
    """One sentence."""
    return ", ".join(f"{n} {word.replace('_', ' ')}" for word, n in counts(examination).items())
