"""`tailguard evaluate`, `tailguard report`, and what `tailguard train` says about data before and after."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_args

import typer

from tailguard.cli.advice import on_command_line
from tailguard.cli.workers import executor_of, working
from tailguard.env.dataset import DataConfig, Part, check_bars
from tailguard.errors import ConfigError, did_you_mean
from tailguard.evaluation.assessment import Assessment, scalars
from tailguard.evaluation.definitions import percent, ratio
from tailguard.evaluation.report import break_even_words, comparison_table
from tailguard.examination import (
    MAIN_SPLITS,
    NEW_BARS,
    WALK_FORWARD,
    evaluation_folder,
    evaluation_name,
    examine,
    examined,
    report_file,
    require_weights_file,
    rewrite_report,
    write_weights,
)
from tailguard.experiment import DataTask, Experiment, ExperimentConfig, GymTask
from tailguard.market.problems import Severity
from tailguard.market.splits import picture
from tailguard.population.tasks import HANG_TIMEOUT_S, Executor
from tailguard.run import RunFolder, run_path
from tailguard.walk_forward import WalkForwardConfig, local_executor, walk_forward

Say = Callable[[str], object]

MOST_NOTES = 16
DOUBTS: tuple[Severity, ...] = ("error", "warning")


def evaluate_run(run: str, files: Sequence[Path], split: str, weights: Path | None, as_json: bool = False) -> None:
    """Examine the newest agent of a run and write its report; of a walk-forward, show what its folds were joined to."""
    folder = RunFolder(run_path(run))
    if weights is not None:
        require_weights_file(weights)
    curve = evaluation_folder(folder) / f"{WALK_FORWARD}.json"
    if curve.is_file() and split in ("test", WALK_FORWARD) and not files:
        found = examined(folder, WALK_FORWARD)
        rewrite_report(folder, WALK_FORWARD)
    else:
        found = examine(folder, part_of(split), [str(file) for file in files])
    report = report_file(folder, evaluation_name(found.subject.split, found.subject.data))
    if weights is not None:
        write_weights(found, weights)
    if as_json:
        typer.echo(json.dumps({**scalars(found), "report": str(report)}))
        return
    for line in summary(found):
        typer.echo(line)
    if weights is not None:
        typer.echo(
            f"weights in {weights}: each is bought at the open of the bar whose `ts` is its `fill_at` (docs/weights.md)"
        )
    typer.echo(f"report in {report}")


def report_run(run: str, split: str | None) -> None:
    """Write the report of a run again."""
    folder = RunFolder(run_path(run))
    folder.require()
    known = sorted(file.stem for file in evaluation_folder(folder).glob("*.json"))
    if split is None and known:
        newest = max(known, key=lambda name: (evaluation_folder(folder) / f"{name}.json").stat().st_mtime_ns)
        split = next((name for name in MAIN_SPLITS if name in known), newest)
    of_new_bars = [name for name in known if name.startswith(f"{NEW_BARS}-")]
    if split == NEW_BARS and len(of_new_bars) == 1:
        split = of_new_bars[0]
    if split not in known:
        raise ConfigError(
            f"{folder.path} has no evaluation {split!r}.{did_you_mean(str(split), known)} It has: "
            f"{', '.join(known) or 'none'}. Make one with `tailguard evaluate {folder.handle}`."
        )
    typer.echo(f"report in {rewrite_report(folder, split)}")
    for other in (name for name in known if name != split):
        typer.echo(f"  there is another: `tailguard report {folder.handle} --split {other}`")


def walk(
    config: ExperimentConfig, run: Path, settings: WalkForwardConfig, quiet: bool, ray_address: str | None = None
) -> None:
    """Train and examine over folds and seeds, in processes of this machine or on a Ray cluster."""
    folder = RunFolder(run)
    say: Say = (lambda text: None) if quiet else typer.echo
    introduce(Experiment(config), say)

    def workplace() -> Executor:
        if ray_address is None:
            return local_executor(folder, settings.workers)
        return executor_of(folder.path, settings.folds * settings.seeds, HANG_TIMEOUT_S, None, ray_address)

    with folder.lock(), working(workplace, "the same command goes on from the last checkpoints.") as executor:
        found = walk_forward(config, folder, settings, say, executor)
    for line in summary(found):
        typer.echo(line)
    typer.echo(f"report in {report_file(folder)}")


def part_of(split: str) -> Part:
    parts = get_args(Part)
    if split not in parts:
        raise ConfigError(f"--split {split}.{did_you_mean(split, parts)} Parts: {', '.join(parts)}.")
    return split  # type: ignore[return-value]


def introduce(experiment: Experiment, say: Say) -> None:
    """Before training on a user's own bars: what was read, what was chosen and why, what trading will cost."""
    task = experiment.task
    if not isinstance(task, DataTask):
        return
    data = task.dataset
    say(f"{data.bars!r}")
    for note in list(dict.fromkeys(data.bars.notes))[:MOST_NOTES]:
        say(f"  {on_command_line(note)}")
    for line in doubts_about(data.config):
        say(line)
    for choice in task.choices:
        said = experiment.config.data
        if said is not None and f"{choice.value:g}" == f"{setting_of(said, choice.setting):g}":
            say(f"  data.{choice.setting} = {choice.value:g}: {choice.reason}")
    costs = data.config.costs
    say(
        f"costs: fee {costs.fee_bps:g}, half spread {costs.half_spread_bps:g}, slippage {costs.slippage_bps:g} bps of "
        f"each trade; impact {costs.impact:g}; borrow {costs.borrow_bps_per_year:g} bps a year "
        f"(change: --set data.costs.fee_bps=5)"
    )
    sizes = [("train", data.split.train), ("validation", data.split.validation), ("test", data.split.test)]
    say("splits: " + ", ".join(f"{name} {len(part):,} bars" for name, part in sizes if part is not None))
    say(f"  {picture(data.split)}")


def doubts_about(config: DataConfig) -> list[str]:
    """What the data check finds in files that could be loaded all the same: close stamps, gaps, jumps."""
    return [
        f"  {Path(file).name}: {'looks wrong' if level == 'error' else 'note'}: {', '.join(codes)}; "
        f"`tailguard data check {shlex.quote(file)}` says where and what to do"
        for file, found in zip(config.files, check_bars(config), strict=True)
        for level in DOUBTS
        if (codes := found.codes(level))
    ]


def setting_of(config: object, path: str) -> float:
    for name in path.split("."):
        config = getattr(config, name)
    return float(config)  # type: ignore[arg-type]


def conclude(experiment: Experiment, folder: RunFolder, say: Say, wanted: bool | None) -> None:
    """After training: examine the agent out of sample and say where the report is.

    wanted: None examines agents of a user's own bars; for an embedded market it says how. False looks at nothing
    """
    if isinstance(experiment.task, GymTask):
        return
    if wanted is False:
        say(f"no report, as asked for: test has not been looked at; `tailguard evaluate {folder.handle}` does")
        return
    if wanted is None and not isinstance(experiment.task, DataTask):
        say(f"examine it on a fresh draw with `tailguard evaluate {folder.handle}`")
        return
    found = examine(folder)
    for line in summary(found):
        say(line)
    say(f"report in {report_file(folder)}")


def summary(found: Assessment) -> list[str]:
    """The first screen of the report in a few lines."""
    verdict, own = found.verdict, found.strategy
    lines = [
        f"{verdict.headline}. {' '.join(verdict.reasons)}",
        f"  {found.subject.split}, {len(own):,} bars ({own.bars_per_year:,.0f} per year): "
        f"Sharpe {ratio(verdict.sharpe.estimate)}, "
        f"deflated {percent(verdict.deflated_sharpe)} after {verdict.n_trials} "
        f"{'trial' if verdict.n_trials == 1 else 'trials'}, turnover {own.turnover_per_year:,.0f} a year, "
        f"break-even cost {break_even_words(found)}",
    ]
    table = comparison_table(found.comparison)
    if table.rows:
        lines.append(f"  Sharpe ± standard error · return of a bar · turnover a year: {' | '.join(table.parts)}")
        lines += [f"    {name:<17}{' | '.join(cells)}" for name, cells in table.rows]
    if found.optimum is not None and found.optimum.fraction is not None:
        best = found.optimum
        lines.append(f"  fraction of the optimum: {best.fraction:.1%} (standard error {best.fraction_stderr:.1%})")
    return lines
