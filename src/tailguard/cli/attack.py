"""`tailguard attack`: what is left of an agent's return when somebody moves what it sees."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from tailguard.errors import ConfigError
from tailguard.evaluation.attack_record import AttackRecord, Point
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
    try:
        record = watched(folder, config, as_json)
    except KeyboardInterrupt:
        typer.echo("stopped; what is done is kept, and the same command goes on from there", err=True)
        raise typer.Exit(130) from None
    reports = [name for name in ("test", "validation") if (evaluation_folder(folder) / f"{name}.json").is_file()]
    report = rewrite_report(folder, reports[0]) if reports else None
    if as_json:
        typer.echo(json.dumps({**asdict(record), "record": str(record_file(folder))}))
        return
    for bound in record.bounds:
        if bound.words is not None:
            typer.echo(f"certificate: {bound.words}")
    typer.echo(f"figures in {record_file(folder)}")
    if report is not None:
        typer.echo(f"picture in {report}")
    else:
        typer.echo(f"`tailguard evaluate {folder.handle}` writes a report with the picture")


COLUMNS = "{:14} {:>9} {:>10} {:>10} {:>22}"


def watched(folder: RunFolder, config: AttackConfig, as_json: bool) -> AttackRecord:
    """With a row for every attack and size as soon as it is known, and on a terminal a bar with the time left."""
    tried = [attack_named(name) for name in config.attacks]
    sizes = sum(len(set(config.bps if one.of_prices else config.epsilons) - {0.0}) for one in tried)
    console = Console(stderr=as_json or not Console().is_terminal, highlight=False, markup=False)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=console, transient=True
    )

    def tell(text: str) -> None:
        if not as_json and console.is_terminal and not console.stderr:
            console.print(text, soft_wrap=True)  # above the bar
        elif not as_json:
            print(text, flush=True)  # a pipe has it at once

    def row(name: str, unit: str, point: Point) -> None:
        if name == "nobody":
            tell(f"{config.seeds} seeds of {config.episodes} episodes each")
            tell(COLUMNS.format("attack", "size", "return", f"CVaR {config.alpha:.0%}", "change of the action"))
        size = f"{point.epsilon:g}{' bps' if unit == 'bps' else ''}"
        tell(COLUMNS.format(name, size, *(f"{figure:.4g}" for figure in (point.mean_return, point.cvar, point.change))))

    with bar:
        task = bar.add_task("clean episodes", total=1 + sizes * config.seeds)
        return attack_run(folder, config, lambda text: bar.update(task, advance=1, description=text), row)
