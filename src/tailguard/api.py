"""Train, open, examine and compare runs from Python: what the command line does, with the same functions.

import tailguard as tg

run = tg.train("bars.csv", tz="UTC", steps=200_000)
run.report()                                   # the path of report.html
tg.compare([run, tg.open_run("other")])
"""

from __future__ import annotations

import html
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import typer

from tailguard.cli.options import bars_of
from tailguard.cli.progress import display_of
from tailguard.cli.train import begin, free_path, go_on
from tailguard.doctor import Examination, chosen, patient_of
from tailguard.doctor import examine as examine_run
from tailguard.env.dataset import DataConfig
from tailguard.errors import ConfigError
from tailguard.evaluation import measures
from tailguard.evaluation.assessment import Assessment
from tailguard.evaluation.backtest import weights_frame
from tailguard.evaluation.definitions import percent, ratio
from tailguard.examination import evaluation_folder, examine, examined, rewrite_report
from tailguard.experiment import experiment_config, load_experiment, merged, saved_experiment
from tailguard.market import Bars, load_bars
from tailguard.presets import PRESETS
from tailguard.run import RunFolder, run_path

if TYPE_CHECKING:
    from tailguard.env.dataset import Part

BARS_FILE = "bars.parquet"
"""Bars that were given as a frame, kept in the run's folder: a run can always be resumed and evaluated again."""
CURVE_POINTS = 300


def train(
    data: Any = None,
    *,
    config: str | Path | Mapping[str, Any] | None = None,
    preset: str | None = None,
    tz: str | None = None,
    stamp: str | None = None,
    symbol: str | None = None,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    repair: Sequence[str] = (),
    ambiguous: str | None = None,
    steps: int | None = None,
    seed: int | None = None,
    run: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    report: bool | None = None,
    quiet: bool = False,
) -> Run:
    """Train an agent in a run folder and examine it, as `tailguard train` does.

    data:     path or paths of bars, a polars or pandas frame, a dict {symbol: frame}, `Bars`, ccxt rows, or the name of
              an embedded market such as "regime"
    config:   a YAML file or a mapping of settings; the other arguments go on top of it
    tz, stamp, symbol, columns, repair, ambiguous: how to read the bars, as in `tailguard.market.load_bars`
    settings: single settings by their whole name: {"ppo.gamma": 0.9, "data.costs.fee_bps": 5}
    run:      name of the folder under runs/, or a path; chosen when it is not given
    report:   whether to examine the agent at the end; None does so for bars, not for an embedded market
    """
    given: dict[str, Any] = {
        name: value for name, value in (("preset", preset), ("steps", steps), ("seed", seed)) if value is not None
    }
    reading = {"tz": tz, "stamp": stamp, "symbol": symbol, "ambiguous": ambiguous}
    folder = None if run is None else RunFolder(run_path(str(run)))
    written: Path | None = None
    if isinstance(data, str) and data in PRESETS and not Path(data).exists():
        given["preset"] = data
    elif (files := _paths(data)) is not None:
        given |= bars_of(files, **_written({**reading, "columns": columns, "repair": repair}))
    elif data is not None:
        bars = _bars(data, {**reading, "columns": columns, "repair": repair})
        if folder is None:
            folder = RunFolder(free_path(f"{bars.symbols[0].replace('/', '-')}-{seed or 0}"))
        written = _keep(bars, folder)
        given |= bars_of([written])
    try:
        for name, value in (settings or {}).items():
            given = _with(given, name.split("."), value)
        if isinstance(config, Mapping):
            wanted = experiment_config(merged(config, given))
        else:
            wanted = load_experiment(config, given)
        display = display_of("quiet" if quiet else "live")
        done = begin(wanted, folder, display, sys.argv, report)
    except typer.Exit:
        raise KeyboardInterrupt from None
    except BaseException:
        if written is not None and not written.with_name("config.yaml").exists():
            written.unlink(missing_ok=True)
        raise
    return Run(done)


def open_run(path: str | Path) -> Run:
    """A run that is there: its name under runs/, or its path."""
    folder = RunFolder(run_path(str(path)))
    folder.require()
    return Run(folder)


def compare(runs: Sequence[Run | str | Path]) -> pl.DataFrame:
    """One row per run: verdict and first figures on its test bars; null where a run has not been examined."""
    rows = []
    for run in (run if isinstance(run, Run) else open_run(run) for run in runs):
        config, found = saved_experiment(run.folder.config_file), run.last_assessment()
        row: dict[str, Any] = {"run": run.name, "steps": max(run.folder.steps(), default=0), "seed": config.seed}
        figures = _figures(found) if found is not None else {}
        row |= {"verdict": found.verdict.headline if found is not None else None}
        rows.append(row | {name: figures.get(name) for name in FIGURES})
    if not rows:
        raise ConfigError("compare([]) has no run. Give runs, or their names under runs/.")
    kinds = {"run": pl.String, "steps": pl.Int64, "seed": pl.Int64, "verdict": pl.String}
    return pl.DataFrame(rows, schema={**kinds, **dict.fromkeys(FIGURES, pl.Float64)})


class Run:
    """A run's folder, with what can be done with it."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder

    @property
    def path(self) -> Path:
        """The folder."""
        return self.folder.path

    @property
    def name(self) -> str:
        """What names it under runs/, or its path."""
        return self.folder.handle

    def __repr__(self) -> str:
        found = self.last_assessment()
        said = found.verdict.headline if found is not None else "not examined"
        return f"Run({self.name!r}, {max(self.folder.steps(), default=0):,} steps, {said})"

    def last_assessment(self) -> Assessment | None:
        """What is known of the agent on its test bars, without a new look; None where it was never examined."""
        there = (evaluation_folder(self.folder) / f"{name}.json" for name in ("test", "walk-forward"))
        name = next((file.stem for file in there if file.is_file()), None)
        return None if name is None else examined(self.folder, name)

    def report(self) -> Path:
        """The path of report.html, written anew; examines the agent on test if that was not done yet."""
        found = self.last_assessment() or examine(self.folder)
        return rewrite_report(self.folder, found.subject.split)

    def weights(self) -> pl.DataFrame:
        """What the account was asked to hold on test: `decided_at`, `fill_at`, `symbol`, `weight`."""
        return weights_frame((self.last_assessment() or examine(self.folder)).strategy)

    def evaluate(self, bars: Any = None, *, split: Part = "test", **reading: Any) -> Assessment:
        """Examine the newest agent on bars that it has never seen, or on a part of the run's own. A look is a trial.

        bars:    paths, a frame, `Bars` or rows; None for the run's own
        reading: tz, stamp, symbol, columns, repair, ambiguous of `bars`, where they are not those of the run's own
        """
        if bars is None:
            return examine(self.folder, split)
        data = saved_experiment(self.folder.config_file).data
        files = _paths(bars)
        if files is not None:
            said = {name: value for name, value in _written(reading).items() if name in reading}
            return examine(self.folder, split, [str(file) for file in files], said)
        trained_on_frame = data is not None and Path(data.files[0]).name == BARS_FILE
        own = {} if data is None or trained_on_frame else {"tz": data.tz, "stamp": data.stamp}
        if not isinstance(bars, Bars) and _says_its_zone(bars):
            own.pop("tz", None)
        loaded = _bars(bars, {**own, **reading})
        place = evaluation_folder(self.folder) / f"bars-{loaded.digest()[:8]}.parquet"
        place.parent.mkdir(exist_ok=True)
        loaded.frame.write_parquet(place)
        usual = DataConfig()
        as_kept = {name: getattr(usual, name) for name in ("symbol", "tz", "stamp", "columns", "repair", "ambiguous")}
        return examine(self.folder, split, [str(place)], as_kept)

    def resume(self, *, steps: int | None = None, quiet: bool = False) -> Run:
        """Go on where the run stopped, to `steps` in all where these are given."""
        try:
            go_on(str(self.folder.path.absolute()), "quiet" if quiet else "live", steps=steps)
        except typer.Exit:
            raise KeyboardInterrupt from None
        return self

    def export(self, folder: str | Path) -> Path:
        """Write the newest agent as a frozen policy, which `tailguard_runtime` runs with numpy alone."""
        from tailguard.frozen import export

        return export(self.folder.path.absolute(), folder)

    def doctor(self, *, quick: bool = True) -> Examination:
        """Run the guarantees on this run's data and settings; `quick` leaves out those that train an agent."""
        return examine_run(patient_of(saved_experiment(self.folder.config_file)), chosen(quick))

    def _repr_html_(self) -> str:
        """Verdict, first figures and equity curve, for notebooks; light and dark."""
        found = self.last_assessment()
        title = f"<b>{html.escape(self.name)}</b>, {max(self.folder.steps(), default=0):,} steps"
        if found is None:
            return f"<div>{title}: not examined yet; <code>run.report()</code> does</div>"
        cells = "".join(
            f"<td style='padding:0 1em 0 0'>{html.escape(name.replace('_', ' '))}<br><b>{_shown(name, value)}</b></td>"
            for name, value in _figures(found).items()
        )
        reasons = html.escape(f"{found.verdict.headline}. {' '.join(found.verdict.reasons)}")
        return f"<div>{title}<p>{reasons}</p><table><tr>{cells}</tr></table>{_curve(found)}</div>"


FIGURES = (
    *("total_return", "annual_return", "sharpe", "deflated_sharpe", "max_drawdown", "cvar_5", "turnover_per_year"),
    *("hold_total_return", "hold_sharpe"),
)


def _figures(found: Assessment) -> dict[str, float]:
    own, hold, year = found.strategy.returns, found.hold.returns, found.strategy.bars_per_year
    values = (
        measures.total_return(own),
        measures.annual_return(own, year),
        measures.sharpe(own, year),
        found.verdict.deflated_sharpe,
        measures.max_drawdown(own),
        measures.cvar(own, 0.05),
        found.strategy.turnover_per_year,
        measures.total_return(hold),
        measures.sharpe(hold, year),
    )
    return dict(zip(FIGURES, map(float, values), strict=True))


def _shown(name: str, value: float) -> str:
    return ratio(value) if name in ("sharpe", "hold_sharpe", "turnover_per_year") else percent(value)


def _curve(found: Assessment) -> str:
    """Equity of the agent, and of buying and holding as a thinner line."""
    curves = [found.strategy.equity, found.hold.equity]
    low, high = (float(bound([bound(curve) for curve in curves])) for bound in (np.min, np.max))
    lines = []
    for curve, style in zip(curves, ("stroke-width='1.6'", "stroke-width='1' stroke-opacity='0.45'"), strict=True):
        rows = np.unique(np.linspace(0, len(curve) - 1, CURVE_POINTS).astype(np.int64))
        x = 400.0 * rows / max(len(curve) - 1, 1)
        y = 98.0 - 96.0 * (curve[rows] - low) / max(high - low, 1e-12)
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
        lines.append(f"<polyline fill='none' stroke='currentColor' {style} points='{points}'/>")
    return (
        "<svg viewBox='0 0 400 100' width='400' height='100' role='img' "
        f"aria-label='equity, agent and buy and hold'>{''.join(lines)}</svg>"
    )


def _paths(data: Any) -> list[Path] | None:
    """The files that were named; None for anything else."""
    if isinstance(data, str | Path):
        return [Path(data)]
    if isinstance(data, list | tuple) and data and all(isinstance(file, str | Path) for file in data):
        return [Path(file) for file in data]
    return None


def _written(reading: Mapping[str, Any]) -> dict[str, Any]:
    """How bars are read, as settings write it."""
    columns = reading.get("columns")
    named = [f"{role}={name}" for role, name in columns.items()] if isinstance(columns, Mapping) else columns
    return {**reading, "columns": list(named or []), "repair": list(reading.get("repair") or [])}


def _says_its_zone(frame: Any) -> bool:
    """Whether a frame has stamps with a zone, so that none need be given."""
    types = [str(kind) for kind in (frame.dtypes if hasattr(frame, "dtypes") else ())]
    index = str(getattr(getattr(frame, "index", None), "dtype", ""))
    return any("time_zone='" in kind or (kind.startswith("datetime64[") and ", " in kind) for kind in [*types, index])


def _bars(data: Any, reading: Mapping[str, Any]) -> Bars:
    """Bars of a frame, of rows, or of a frame per symbol."""
    if isinstance(data, Bars):
        return data
    options = {name: value for name, value in reading.items() if value is not None}
    if isinstance(data, Mapping) and data and all(hasattr(frame, "columns") for frame in data.values()):
        options.pop("symbol", None)
        parts = {str(name): load_bars(frame, symbol=str(name), **options) for name, frame in data.items()}
        notes = [f"{name}: {note}" for name, part in parts.items() for note in part.notes]
        return Bars(pl.concat([part.frame for part in parts.values()], how="diagonal_relaxed"), notes=notes)
    return load_bars(data, **options)


def _keep(bars: Bars, folder: RunFolder) -> Path:
    if folder.config_file.exists():
        raise ConfigError(f"{folder.path} already holds a run. Choose another run=, or open_run() and resume() it.")
    folder.path.mkdir(parents=True, exist_ok=True)
    file = folder.path / BARS_FILE
    bars.frame.write_parquet(file)
    return file


def _with(tree: Mapping[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """The tree of settings with the one at `path` set."""
    name, *rest = path
    below = tree.get(name)
    return {**tree, name: _with(below if isinstance(below, Mapping) else {}, rest, value) if rest else value}
