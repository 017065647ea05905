"""`tailguard attack`: what is left of an agent's return when somebody moves what it sees."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tailguard.errors import ConfigError
from tailguard.evaluation.attack_record import AttackRecord
from tailguard.examination import evaluation_folder, rewrite_report
from tailguard.robustness.attacks import attack_named
from tailguard.robustness.bench import AttackConfig
from tailguard.robustness.runs import attack_run, default_attacks, experiment_of, record_file
from tailguard.run import RunFolder, run_path


def numbers(text: str, option: str) -> tuple[float, ...]:
    """'0.05,0.1' as numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text}: give numbers with commas between them, such as 0.05,0.1.") from None


def attack_config(run: str, attacks: Sequence[str], **given: Any) -> AttackConfig:
    """What is asked for on the command line, and every attack that needs no training where none is named."""
    chosen = tuple(attacks) or default_attacks(experiment_of(RunFolder(run_path(run))))
    return AttackConfig(attacks=chosen, **{name: value for name, value in given.items() if value is not None})


def start(run: str, config: AttackConfig, as_json: bool) -> None:
    """Attack, show progress, write the record, and put the picture into the report where there is one."""
    folder = RunFolder(run_path(run))
    record = watched(folder, config, Console(stderr=True))
    reports = [name for name in ("test", "validation") if (evaluation_folder(folder) / f"{name}.json").is_file()]
    report = rewrite_report(folder, reports[0]) if reports else None
    if as_json:
        typer.echo(json.dumps({**asdict(record), "record": str(record_file(folder))}))
        return
    show(record, Console())
    typer.echo(f"figures in {record_file(folder)}")
    if report is not None:
        typer.echo(f"picture in {report}")
    else:
        typer.echo(f"`tailguard evaluate {folder.handle}` writes a report with the picture")


def watched(folder: RunFolder, config: AttackConfig, console: Console) -> AttackRecord:
    """With a bar that says what is being tried."""
    tried = [attack_named(name) for name in config.attacks]
    sizes = sum(len(set(config.bps if one.of_prices else config.epsilons) - {0.0}) for one in tried)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console, transient=True
    )
    with bar:
        task = bar.add_task("clean episodes", total=1 + sizes * config.seeds)
        return attack_run(folder, config, lambda text: bar.update(task, advance=1, description=text))


def show(record: AttackRecord, console: Console) -> None:
    """A table of every attack and size, and the proven bounds where they say something."""
    table = Table(title=f"{record.seeds} seeds of {record.episodes} episodes each")
    for name in ("attack", "size", "return", f"CVaR {record.alpha:.0%}", "change of the action"):
        table.add_column(name, justify="left" if name == "attack" else "right")
    clean = record.curves[0].points[0]
    table.add_row("nobody", "0", f"{clean.mean_return:.4g}", f"{clean.cvar:.4g}", "0")
    for curve in record.curves:
        for point in curve.points[1:]:
            size = f"{point.epsilon:g}{' bps' if curve.unit == 'bps' else ''}"
            figures = (point.mean_return, point.cvar, point.change)
            table.add_row(curve.name, size, *(f"{figure:.4g}" for figure in figures))
    console.print(table)
    for bound in record.bounds:
        if bound.words is not None:
            console.print(f"certificate: {bound.words}", soft_wrap=True)
