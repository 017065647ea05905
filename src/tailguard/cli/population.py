"""`tailguard population`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.table import Table

from tailguard.cli.train import exit_on_alerts, free_path
from tailguard.cli.workers import executor_of, working
from tailguard.population.config import load_population, load_saved_population
from tailguard.population.driver import Population
from tailguard.population.journal import Journal
from tailguard.population.report import member_columns, member_rows, write_report
from tailguard.population.scheduler import PBTScheduler
from tailguard.population.tasks import Executor
from tailguard.run import RunFolder, run_path


def start(
    config_file: Path,
    overrides: Sequence[str],
    run: str | None,
    workers: int | None,
    ray_address: str | None,
    kind: str,
    dry_run: bool,
    fail_on_alert: bool = False,
) -> None:
    """Begin a population, or go on with the one in the folder."""
    begun = not overrides and RunFolder(config_file.parent).population_journal.is_file()
    config = load_saved_population(config_file) if begun else load_population(config_file, overrides)
    if dry_run:
        typer.echo(config.to_yaml(), nl=False)
        return
    folder = run_path(run) if run is not None else free_path(f"population-{config.experiment.seed}")
    settings = config.population
    size, timeouts = settings.population_size, (settings.hang_timeout_s, settings.start_timeout_s)

    def workplace() -> Executor:
        return executor_of(folder, size, timeouts[0], workers, ray_address, timeouts[1])

    again = f"nothing is lost: `tailguard resume {RunFolder(folder).handle}` goes on."
    with working(workplace, again) as executor:
        population = Population(config, folder, executor)
        with DISPLAYS[kind](population) as shown:
            scheduler = population.run(shown)
    report = write_report(population.folder, config, scheduler)
    conclude(population, report, RunFolder(folder.with_name(f"{folder.name}-best")).handle, kind)
    if fail_on_alert:
        exit_on_alerts(RunFolder(folder))


def conclude(population: Population, report: Path, handle: str, kind: str) -> None:
    """Say who is best, where things are and what to do next; a population without a best has failed."""
    best, run = population.scheduler.best, population.best_run
    if best is None:
        typer.echo(f"All members failed; see {population.folder / 'logs'} and {population.journal.path}.", err=True)
        raise typer.Exit(1)
    if kind == "quiet":
        return
    for line in (
        f"member {best.index} is best with {best.score:.4g}; as a run it is in {run.path}",
        f"examine it with `tailguard evaluate {handle}`",
        f"report in {report}",
    ):
        typer.echo(line, err=kind == "json")


def begun_in(run: str) -> Path | None:
    """The configuration of the population in a folder; None when the folder holds something else."""
    folder = RunFolder(run_path(run))
    return folder.config_file if folder.population_journal.is_file() else None


Shown = Callable[[Population], None]


@contextmanager
def live(population: Population) -> Iterator[Shown]:
    """A table that redraws itself; without a terminal, a line per round."""
    console = Console(highlight=False, markup=False)
    if console.is_terminal:
        with Live(table(population), console=console, refresh_per_second=2) as screen:
            yield lambda p: screen.update(table(p))
        return
    told = -1

    def tell(p: Population) -> None:
        nonlocal told
        scheduler = p.scheduler
        in_rounds = scheduler.config.mode == "rounds"
        now = scheduler.round if in_rounds else min(member.segments for member in scheduler.members)
        if now != told:
            told, best = now, scheduler.best
            score = "-" if best is None else f"{best.score:.4g} (member {best.index})"
            console.print(f"{progress(scheduler)}, best score {score}", soft_wrap=True)

    yield tell


@contextmanager
def as_json(population: Population) -> Iterator[Shown]:
    """Every line of the journal, as it is written."""
    told = 0

    def tell(p: Population) -> None:
        nonlocal told
        lines = Journal(p.journal.path).read()
        for line in lines[told:]:
            typer.echo(json.dumps(line))
        told = len(lines)

    yield tell


@contextmanager
def quiet(population: Population) -> Iterator[Shown]:
    yield lambda p: None


DISPLAYS = {"live": live, "json": as_json, "quiet": quiet}


def progress(scheduler: PBTScheduler) -> str:
    """How far a population is: its round, when it has rounds, and the segments that are done."""
    done, members = sum(member.segments for member in scheduler.members), scheduler.members
    segments = f"{done} of {scheduler.n_rounds * len(members)} segments done"
    if scheduler.config.mode == "asynchronous":
        return segments
    return f"round {scheduler.round + 1} of {scheduler.n_rounds}, {segments}"


def table(population: Population) -> Table:
    """Member, score, settings, whose copy, state, and how the last update went."""
    shown = Table(caption=progress(population.scheduler), caption_justify="left", box=SIMPLE, padding=(0, 0))
    for name in member_columns(population.config):
        shown.add_column(name, justify="right", overflow="fold")  # long paths fold: none is cut short
    for row in member_rows(population.scheduler, population.told):
        shown.add_row(*row)
    return shown
