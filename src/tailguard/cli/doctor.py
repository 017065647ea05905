"""`tailguard doctor`: the examination with a live table, and its JSON and HTML files."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from tailguard.doctor import Examination, Patient, chosen, env_patient, examine, patient_of, preset_patient, summary
from tailguard.doctor.examination import Line
from tailguard.errors import ConfigError
from tailguard.experiment import load_experiment
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
    return patient_of(load_experiment(folder.config_file))


def see_doctor(
    patient: Patient, quick: bool, only: str | None, json_file: Path | None, html_file: Path | None
) -> Examination:
    """Examine, showing each verdict as it comes."""
    console = Console()
    checks = chosen(quick, only)
    if not checks:
        raise ConfigError(f"No check's name contains {only!r}. Run `tailguard doctor --preset regime` to see them all.")
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console, transient=True
    )
    with bar:
        names = iter([check.question for check in checks])
        task = bar.add_task(next(names), total=len(checks))

        def told(line: Line) -> None:
            show(console, line)
            bar.update(task, advance=1, description=next(names, "done"))

        found = examine(patient, checks, told)
    console.print(f"{patient.name}: {summary(found)}", highlight=False)
    if json_file is not None:
        json_file.write_text(found.to_json())
    if html_file is not None:
        html_file.write_text(found.to_html())
    return found


def show(console: Console, line: Line) -> None:
    """A verdict as a line, and what to do when it failed."""
    verdict = line.verdict
    colour = COLOURS[verdict.status]
    console.print(f"[{colour}]{verdict.status:>4}[/]  [bold]{escape(line.question)}[/]", highlight=False)
    for text in (verdict.figure, verdict.advice):
        if text:
            console.print(Padding(Text(text), (0, 0, 0, 6)))
