"""The command `tailguard`. Exit codes: 0 fine, 1 a check failed, 2 bad input (one clear message, no traceback)."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from tailguard.cli.options import Ambiguous, ColumnNames, OneSymbol, Repairs, bars_of
from tailguard.cli.streams import lasting_streams
from tailguard.errors import ConfigError, DataError, TailguardError, did_you_mean
from tailguard.files import reason, shown

app = typer.Typer(
    help="Train trading agents that know their tail risk.", no_args_is_help=True, pretty_exceptions_enable=False
)


def print_version(wanted: bool) -> None:
    """The installed version, and nothing else."""
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tailguard {version('tailguard')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Train trading agents that know their tail risk."""


data = typer.Typer(help="Look at market data before trusting it.", no_args_is_help=True)
app.add_typer(data, name="data")


@data.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="CSV, JSON, parquet or feather file of bars.")],
    tz: Annotated[str | None, typer.Option(help="Time zone of naive stamps, such as UTC or America/New_York.")] = None,
    stamp: Annotated[str | None, typer.Option(help="Whether a bar is stamped at its `open` or its `close`.")] = None,
    columns: ColumnNames = None,
    repair: Repairs = None,
    ambiguous: Ambiguous = None,
    accept: Annotated[
        list[str] | None, typer.Option(help="A finding that is known and meant, such as unit_jump; may be repeated.")
    ] = None,
) -> None:
    """Validate bars: say what is wrong, in which row, and how to fix it.

    Example: tailguard data check bars.csv --tz UTC
    """
    from tailguard.cli.advice import on_command_line
    from tailguard.market.check import check_file, render
    from tailguard.market.layout import columns_of
    from tailguard.market.sources import MENDED, REPAIRS

    for name in repair or []:
        if name not in REPAIRS:
            raise ConfigError(f"--repair {name}.{did_you_mean(name, REPAIRS)} Known: {', '.join(REPAIRS)}.")
    mended = [code for name in repair or [] for code in MENDED[name]]
    found = check_file(
        file,
        stamp=stamp,  # type: ignore[arg-type]
        tz=tz,
        columns=columns_of(columns.split(",")) if columns else None,
        ambiguous=ambiguous or "raise",  # type: ignore[arg-type]
        accept=[*(accept or []), *mended],
    )
    typer.echo(on_command_line(render(found)))
    raise typer.Exit(found.exit_code)


@app.command()
def demo(
    preset: Annotated[str, typer.Option(help="Which embedded market: regime, signal, noise, pairs.")] = "regime",
    seed: Annotated[int, typer.Option(help="Seed of market and agent.")] = 0,
    steps: Annotated[int | None, typer.Option(help="Environment steps; the preset's own by default.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the run; an earlier demo there is replaced.")] = Path(
        "runs/demo"
    ),
) -> None:
    """Train on an embedded market whose optimum is known, print the fraction of it reached, and write a report.

    Example: tailguard demo --preset signal --seed 1
    """
    from tailguard.cli.demo import run_demo

    run_demo(preset, seed, steps, out)


@app.command()
def train(
    config: Annotated[Path | None, typer.Argument(help="YAML file; everything else goes on top of it.")] = None,
    preset: Annotated[str | None, typer.Option(help="Embedded market: regime, regime_hard, signal, ...")] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="Your own bars: CSV, JSON, parquet or feather; repeat for several files.")
    ] = None,
    tz: Annotated[str | None, typer.Option(help="Time zone of naive stamps in --data, such as UTC.")] = None,
    stamp: Annotated[str | None, typer.Option(help="Whether bars of --data are stamped at `open` or `close`.")] = None,
    symbol: OneSymbol = None,
    columns: ColumnNames = None,
    repair: Repairs = None,
    ambiguous: Ambiguous = None,
    steps: Annotated[int | None, typer.Option(help="Environment steps; the preset's own by default.")] = None,
    seed: Annotated[int | None, typer.Option(help="Root of every random stream.")] = None,
    run: Annotated[str | None, typer.Option(help="Name of the folder under runs/, or a path.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, such as ppo.gamma=0.9; may be repeated.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON line per update instead of the display.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")] = False,
    report: Annotated[
        bool | None, typer.Option(help="Examine the agent at the end and write report.html; on for --data.")
    ] = None,
    fail_on_alert: Annotated[
        bool, typer.Option("--fail-on-alert", help="End with exit code 1 when training raised an alert.")
    ] = False,
    seeds: Annotated[
        str | None, typer.Option(help="Several seeds, such as 0-4: one run each, in parallel; goes on after a stop.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", "--jobs", help="With --seeds: processes; the cores by default.")
    ] = None,
    ray: Annotated[str | None, typer.Option(help="With --seeds: address of a Ray cluster, or `local`.")] = None,
) -> None:
    """Train an agent in a run folder. Ctrl-C, SIGTERM or a closed terminal stop it with a checkpoint.

    Example: tailguard train --preset regime --steps 200000 --seed 1 --run first --set ppo.gamma=0.95

    Example: tailguard train --data bars.csv --tz UTC
    """
    from tailguard.cli.train import start

    given: dict[str, Any] = {
        name: value for name, value in (("preset", preset), ("steps", steps), ("seed", seed)) if value is not None
    }
    given |= bars_of(data, tz=tz, stamp=stamp, symbol=symbol, columns=columns, repair=repair, ambiguous=ambiguous)
    kind = "quiet" if quiet else "json" if json_ else "live"
    if seeds is not None:
        from tailguard.cli.seeds import Study, start_seeds

        if seed is not None:
            raise ConfigError("--seed and --seeds are both given. Use one of them.")
        start_seeds(config, given, set_ or [], run, Study(seeds, workers, ray, kind, dry_run, report, fail_on_alert))
        return
    if workers is not None or ray is not None:
        raise ConfigError("--workers and --ray train several seeds at once: say which with --seeds, such as 0-4.")
    start(config, given, set_ or [], run, kind, dry_run, report, fail_on_alert)


@app.command()
def resume(
    run: Annotated[str, typer.Argument(help="Name of the folder under runs/, or a path.")],
    steps: Annotated[int | None, typer.Option(help="Train on to this many steps in all.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")] = False,
    json_: Annotated[
        bool, typer.Option("--json", help="Print one JSON line per update instead of the display.")
    ] = False,
    fail_on_alert: Annotated[
        bool, typer.Option("--fail-on-alert", help="End with exit code 1 when training raised an alert, at any time.")
    ] = False,
) -> None:
    """Go on exactly where a run stopped: the end is bit for bit that of a run that never stopped.

    Example: tailguard resume first

    Example: tailguard resume first --steps 500000
    """
    from tailguard.cli.population import begun_in, start
    from tailguard.cli.train import go_on

    kind = "quiet" if quiet else "json" if json_ else "live"
    population_file = begun_in(run)
    if population_file is not None:
        if steps is not None:
            raise ConfigError(f"{run} is a population; its length is population.rounds in its configuration.")
        start(population_file, [], run, None, None, kind, False, fail_on_alert)
    else:
        go_on(run, kind, fail_on_alert, steps)


@app.command("walk-forward")
def walk_forward(
    config: Annotated[Path | None, typer.Argument(help="YAML file; everything else goes on top of it.")] = None,
    data: Annotated[
        list[Path] | None, typer.Option(help="Your own bars: CSV, JSON, parquet or feather; repeat for several files.")
    ] = None,
    tz: Annotated[str | None, typer.Option(help="Time zone of naive stamps in --data, such as UTC.")] = None,
    stamp: Annotated[str | None, typer.Option(help="Whether bars of --data are stamped at `open` or `close`.")] = None,
    symbol: OneSymbol = None,
    columns: ColumnNames = None,
    repair: Repairs = None,
    ambiguous: Ambiguous = None,
    folds: Annotated[int, typer.Option(help="Test segments, one after the other.")] = 5,
    seeds: Annotated[int, typer.Option(help="Agents per fold.")] = 3,
    workers: Annotated[int, typer.Option("--workers", "--jobs", help="Processes that train at the same time.")] = 2,
    ray: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster, or `local`; needs the extra tailguard\\[ray].")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Environment steps of each agent.")] = None,
    seed: Annotated[int | None, typer.Option(help="First of the seeds.")] = None,
    run: Annotated[str | None, typer.Option(help="Name of the folder under runs/, or a path.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, such as ppo.gamma=0.9; may be repeated.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the result only.")] = False,
) -> None:
    """Train over folds in time and seeds, and report one out-of-sample curve. Called again, it goes on.

    Example: tailguard walk-forward --data bars.csv --tz UTC --folds 5 --seeds 3 --run forward
    """
    from tailguard.cli.evaluate import walk
    from tailguard.cli.train import free_path
    from tailguard.experiment import Experiment, load_experiment, on_shared_paths
    from tailguard.run import run_path
    from tailguard.walk_forward import WalkForwardConfig

    given: dict[str, Any] = {name: value for name, value in (("steps", steps), ("seed", seed)) if value is not None}
    given |= bars_of(data, tz=tz, stamp=stamp, symbol=symbol, columns=columns, repair=repair, ambiguous=ambiguous)
    wanted = on_shared_paths(load_experiment(config, given, set_ or []))
    place = run_path(run) if run is not None else free_path(f"{Experiment(wanted).task.name}-forward")
    walk(wanted, place, WalkForwardConfig(folds=folds, seeds=seeds, workers=workers), quiet, ray)


@app.command()
def evaluate(
    run: Annotated[str, typer.Argument(help="Name of the folder under runs/, or a path.")],
    data: Annotated[
        list[Path] | None, typer.Option(help="Bars the agent has never seen; all of them are test. May be repeated.")
    ] = None,
    split: Annotated[str, typer.Option(help="Part of the run's own bars: test, validation or train.")] = "test",
    weights: Annotated[
        Path | None, typer.Option(help="Also write the weights to hold, for another backtester (.parquet, .csv).")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as one JSON line.")] = False,
) -> None:
    """Backtest the newest agent of a run out of sample and write runs/RUN/report.html. Each look is a trial.

    Other parts and other bars get a report of their own beside it: report-train.html, report-new-bars-1a2b3c4d.html.
    Of a walk-forward it shows the curve that is there, and looks at nothing anew.

    Example: tailguard evaluate first --weights weights.parquet
    """
    from tailguard.cli.evaluate import evaluate_run

    evaluate_run(run, data or [], split, weights, json_)


@app.command()
def report(
    run: Annotated[str, typer.Argument(help="Name of the folder under runs/, or a path.")],
    split: Annotated[str | None, typer.Option(help="Which evaluation; test where there is one, else the last.")] = None,
) -> None:
    """Write a report again from an evaluation that is there, with the trials counted anew.

    Example: tailguard report first
    """
    from tailguard.cli.evaluate import report_run

    report_run(run, split)


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="Name of the folder under runs/, or a path.")],
    to: Annotated[Path | None, typer.Option("--to", help="Folder to write; runs/RUN/frozen by default.")] = None,
) -> None:
    """Write the newest agent of a run as a frozen policy, which tailguard_runtime runs with numpy alone.

    Example: tailguard export first --to frozen
    """
    from tailguard.frozen import export as export_policy
    from tailguard.run import run_path

    place = export_policy(run, to if to is not None else run_path(run) / "frozen")
    typer.echo(f"frozen policy in {place}: tailguard_runtime.FrozenPolicy.load({str(place)!r})")
    if not (place / "step.onnx").exists():
        typer.echo("without step.onnx: install tailguard[onnx] and export again if you want the ONNX graph of a step")


@app.command()
def doctor(
    target: Annotated[str | None, typer.Argument(help="A run under runs/, a path, or a YAML file.")] = None,
    preset: Annotated[str | None, typer.Option(help="Embedded market: regime, signal, noise, pairs, ...")] = None,
    env: Annotated[str | None, typer.Option(help="module:function that makes one Gymnasium environment.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the checks that train an agent.")] = False,
    only: Annotated[str | None, typer.Option(help="Only checks whose name contains this, such as market/.")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Also write the verdicts to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write them as a page.")] = None,
) -> None:
    """Run the guarantees on your own environment, data and settings. Exit code 1 when one does not hold.

    Example: tailguard doctor --preset regime

    Example: tailguard doctor --env mypackage.envs:make_env --json verdicts.json
    """
    from tailguard.cli.doctor import patient_from, see_doctor

    sys.path.insert(0, "")  # so that --env finds modules of the current folder, as `python -m` does
    found = see_doctor(patient_from(target, preset, env), quick, only, json_, html)
    raise typer.Exit(1 if found.failures else 0)


@app.command()
def population(
    config: Annotated[Path, typer.Argument(help="YAML file: an experiment with a `population` section.")],
    workers: Annotated[
        int | None, typer.Option("--workers", "--jobs", help="Processes on this machine; its cores by default.")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="Address of a Ray cluster, or `local`; needs the extra tailguard\\[ray].")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Name of the folder under runs/; an unfinished one goes on.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="One setting, such as population.max_failures=5; may be repeated.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print warnings and errors only.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the lines of the journal instead of the table.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and stop.")] = False,
    fail_on_alert: Annotated[
        bool, typer.Option("--fail-on-alert", help="End with exit code 1 when it or a member raised an alert.")
    ] = False,
) -> None:
    """Train a population: members vary some settings, and the worst go on as copies of the best.

    Example: tailguard population population.yaml --workers 4 --run first
    """
    from tailguard.cli.population import start

    kind = "quiet" if quiet else "json" if json_ else "live"
    start(config, set_ or [], run, workers, ray, kind, dry_run, fail_on_alert)


@app.command()
def attack(
    run: Annotated[str, typer.Argument(help="Name of the folder under runs/, or a path.")],
    attack: Annotated[
        list[str] | None,
        typer.Option(help="random, critic, mad, learned, price-random, price, price-learned; may be repeated."),
    ] = None,
    epsilon: Annotated[str | None, typer.Option(help="Sizes in units of what the policy sees: 0.05,0.1,0.2.")] = None,
    bps: Annotated[str | None, typer.Option(help="Sizes of price attacks in basis points: 1,5,20.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Draws of episodes, each attacked by itself.")] = None,
    episodes: Annotated[int | None, typer.Option(help="Episodes per attack, size and seed.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps that a learned attacker is trained for.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as one JSON line.")] = False,
) -> None:
    """Attack the newest agent of a run: return, CVaR and change of its actions against the size of the lie.

    Example: tailguard attack first --attack mad --attack price --epsilon 0.05,0.1 --bps 5
    """
    from tailguard.cli.attack import attack_config, numbers, start

    sizes = {
        "epsilons": numbers(epsilon, "--epsilon") if epsilon is not None else None,
        "bps": numbers(bps, "--bps") if bps is not None else None,
    }
    start(run, attack_config(run, attack or [], **sizes, seeds=seeds, episodes=episodes, steps=steps), json_)


def main() -> None:
    """Entry point: turns errors that a user can act on into one line and exit code 2."""
    warnings.formatwarning = lambda message, *_, **__: f"tailguard: {message}\n"
    with lasting_streams():
        try:
            app()
        except DataError as error:
            from tailguard.cli.advice import on_command_line

            typer.echo(f"tailguard: {on_command_line(str(error))}", err=True)
            sys.exit(2)
        except (TailguardError, MemoryError) as error:
            typer.echo(f"tailguard: {error or 'there is not enough memory for this.'}", err=True)
            sys.exit(2)
        except OSError as error:
            if error.filename is None:
                raise
            where = shown(os.fsdecode(error.filename))
            typer.echo(f"tailguard: {where}: {reason(error)}. Choose another place, or make room there.", err=True)
            sys.exit(2)
