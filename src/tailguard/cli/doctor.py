"""`tailguard doctor`: the examination with a live table, and its JSON and HTML files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from tailguard.doctor import (
    CHECKS,
    Examination,
    Patient,
    chosen,
    env_patient,
    examine,
    patient_of,
    preset_patient,
    summary,
)
from tailguard.doctor.examination import Line
from tailguard.errors import ConfigError
from tailguard.experiment import load_experiment, saved_experiment
from tailguard.run import RunFolder, run_path

COLOURS = {"pass": "green", "fail": "bold red", "n/a": "dim"}


def patient_from(target: str | None, preset: str | None, env: str | None) -> Patient:
    """Exactly one of: a run folder or a YAML file, a preset, a function that makes an environment."""
    given = [value for value in (target, preset, env) if value is not None]
    if len(given) != 1:
        raise ConfigError(
            "Say who is to be examined: a run or a YAML file, --preset NAME, or --env module:function; one of them."
        )
    if preset is not None:
        return preset_patient(preset)
    if env is not None:
        return env_patient(env)
    path = Path(str(target))
    if path.suffix in (".yaml", ".yml"):
        return patient_of(load_experiment(path))
    folder = RunFolder(run_path(str(target)))
    folder.require()
    return patient_of(saved_experiment(folder.config_file))


def see_doctor(
    patient: Patient, quick: bool, only: str | None, json_file: Path | None, html_file: Path | None
) -> Examination:
    """Examine, showing each verdict as it comes."""
    console = Console(highlight=False, markup=False)
    checks = chosen(quick, only)
    if not checks:
        raise ConfigError(f"No check's name contains {only!r}. They are: {', '.join(check.name for check in CHECKS)}.")
    for file in (json_file, html_file):
        refuse_unwritable(file)
    bar = Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with warnings.catch_warnings(), bar:
        warnings.simplefilter("once")  # an environment is built hundreds of times
        names = iter([check.question for check in checks])
        task = bar.add_task(next(names), total=len(checks))

        def told(line: Line) -> None:
            show(console, line)
            bar.update(task, advance=1, description=next(names, "done"))

        found = examine(patient, checks, told)
    conclude(console, found, {json_file: Examination.to_json, html_file: Examination.to_html})
    return found


def refuse_unwritable(file: Path | None) -> None:
    """Before minutes of work, not after them."""
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"{file} cannot be written: there is no folder {file.parent}.")


def conclude(console: Console, found: Examination, files: Mapping[Path | None, Callable[[Examination], str]]) -> None:
    """The summary, the lines that failed, and the files."""
    console.print(f"{found.patient}: {summary(found)}", soft_wrap=True)
    if found.failures:
        console.print(f"failed: {', '.join(line.name for line in found.failures)}", soft_wrap=True, style="bold red")
    for file, render in files.items():
        if file is not None:
            file.write_text(render(found))
            console.print(f"verdicts in {file}", soft_wrap=True)


def show(console: Console, line: Line) -> None:
    """A verdict as a line, and what to do when it failed."""
    verdict = line.verdict
    head = Text.assemble(
        (f"{verdict.status:>4}", COLOURS[verdict.status]), "  ", (line.question, "bold"), "  ", (line.name, "dim")
    )
    console.print(head, soft_wrap=True)
    for text in (verdict.figure, verdict.advice):
        if text:
            for row in Text(text).wrap(console, max(console.width - 6, 40)):
                console.print(f"      {row.plain.rstrip()}", soft_wrap=True)
