"""The report: one self-contained HTML page about one assessment. No script, nothing fetched, made to be printed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np

from tailguard.evaluation import measures
from tailguard.evaluation.assessment import Assessment
from tailguard.evaluation.backtest import MAX_BREAK_EVEN_BPS, Backtest, volatility_matched
from tailguard.evaluation.comparison import PartResult, of_strategy
from tailguard.evaluation.definitions import (
    ALPHA,
    DEFINITIONS,
    FURTHER,
    costs_per_year,
    fine_percent,
    percent,
    ratio,
)
from tailguard.evaluation.pictures import (
    attack_charts,
    behaviour_charts,
    cost_charts,
    health_charts,
    performance_charts,
    risk_charts,
)
from tailguard.evaluation.training_record import TrainingRecord

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
HELD = 1e-3


class Tile(NamedTuple):
    """A figure of the first screen."""

    name: str
    value: str
    detail: str


def write_report(assessment: Assessment, training: TrainingRecord, path: Path) -> Path:
    """Render to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(assessment, training), encoding="utf-8")
    return path


def render(assessment: Assessment, training: TrainingRecord | None = None) -> str:
    """The page as text."""
    training = training or TrainingRecord()
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(
        resources.files("tailguard.evaluation").joinpath("report.html.j2").read_text(encoding="utf-8")
    )
    own, hold = assessment.strategy, assessment.hold
    matched = volatility_matched(hold, own)
    return template.render(
        subject=assessment.subject,
        verdict=assessment.verdict,
        first=str(own.fill_at[0].astype("datetime64[D]")),
        last=str(own.fill_at[-1].astype("datetime64[D]")),
        n_bars=f"{len(own):,}",
        bars_per_year=f"{own.bars_per_year:,.0f}",
        symbols=own.symbols,
        tiles=tiles(assessment, matched),
        comparison=comparison_table(assessment.comparison),
        cautions=cautions(assessment),
        optimum=assessment.optimum,
        performance=performance_charts(assessment, matched),
        months=month_table(own),
        month_names=MONTHS,
        measures=measure_table(own, hold, matched),
        risk=risk_charts(assessment, training),
        calibration=assessment.calibration,
        promise=promise_words(assessment, training),
        costs=cost_charts(assessment),
        stress=stress_table(assessment),
        cost_settings=[(name, f"{value:g}") for name, value in assessment.costs.model_dump().items()],
        behaviour=behaviour_charts(assessment),
        behaviour_figures=behaviour_figures(own),
        attacks=attack_charts(training.attacks),
        attack_rows=attack_rows(training),
        bounds=bound_words(training),
        health=health_charts(training),
        alerts=alert_rows(training),
        n_updates=len(training.rows),
        integrity=integrity_rows(assessment),
        checks=assessment.checks,
        definitions=DEFINITIONS,
        further=FURTHER,
    )


def attack_rows(training: TrainingRecord) -> list[tuple[str, ...]]:
    """Attack, size, return, CVaR and change of the action, one row per size."""
    if training.attacks is None:
        return []
    return [
        (
            f"{curve.name}: {curve.meaning}",
            f"{point.epsilon:g}{' bps' if curve.unit == 'bps' else ''}",
            *(f"{figure:.4g}" for figure in (point.mean_return, point.cvar, point.change)),
        )
        for curve in training.attacks.curves
        for point in curve.points
    ]


def bound_words(training: TrainingRecord) -> list[str]:
    """What is proven; a bound as wide as the action space says nothing and is left out."""
    bounds = training.attacks.bounds if training.attacks else ()
    return [bound.words for bound in bounds if bound.words is not None]


class ComparisonTable(NamedTuple):
    """Strategies by parts of the bars: train, validation and test side by side."""

    parts: list[str]
    rows: list[tuple[str, list[str]]]
    """Name of the strategy, and per part its Sharpe ratio with the standard error, return of a bar and turnover."""


def comparison_table(comparison: Sequence[PartResult]) -> ComparisonTable:
    """Empty where there was no training to compare with."""
    sizes = {result.part: result.n_bars for result in comparison}
    rows = []
    for name in dict.fromkeys(result.strategy for result in comparison):
        found = of_strategy(comparison, name)
        rows.append((name, [comparison_cell(found[part]) if part in found else "" for part in sizes]))
    return ComparisonTable([f"{part}, {n:,} bars" for part, n in sizes.items()], rows)


def comparison_cell(result: PartResult) -> str:
    return (
        f"{ratio(result.sharpe)} ± {ratio(result.sharpe_stderr)} · {result.bps_per_bar:+.2f} bps · "
        f"{result.turnover_per_year:,.0f} times"
    )


def tiles(assessment: Assessment, matched: Backtest) -> list[Tile]:
    """The figures of the first screen."""
    own, hold, verdict = assessment.strategy, assessment.hold, assessment.verdict
    trials = "1 trial" if verdict.n_trials == 1 else f"{verdict.n_trials} trials"
    rate = own.bars_per_year
    return [
        Tile(
            "In-sample Sharpe" if assessment.subject.in_sample else "Out-of-sample Sharpe",
            ratio(verdict.sharpe.estimate),
            f"95 %: {ratio(verdict.sharpe.low)} to {ratio(verdict.sharpe.high)} · "
            f"holding {ratio(measures.sharpe(hold.returns, rate))}",
        ),
        Tile("Deflated Sharpe", percent(verdict.deflated_sharpe), f"probability of skill above luck, {trials}"),
        Tile(
            "Total return",
            percent(measures.total_return(own.returns)),
            f"holding {percent(measures.total_return(hold.returns))}, at equal volatility "
            f"{percent(measures.total_return(matched.returns))}",
        ),
        Tile(
            "Alpha a year",
            percent(verdict.alpha.estimate),
            f"95 %: {percent(verdict.alpha.low)} to {percent(verdict.alpha.high)} · beta {ratio(verdict.beta)}",
        ),
        Tile(
            "CVaR 5 % of a bar",
            fine_percent(measures.cvar(own.returns, ALPHA)),
            f"mean of the worst bars · holding {fine_percent(measures.cvar(hold.returns, ALPHA))}",
        ),
        Tile(
            "Maximum drawdown",
            percent(measures.max_drawdown(own.returns)),
            f"holding {percent(measures.max_drawdown(hold.returns))}, at equal volatility "
            f"{percent(measures.max_drawdown(matched.returns))}",
        ),
        Tile("Turnover a year", f"{own.turnover_per_year:,.0f} times", f"costs {percent(costs_per_year(own))} a year"),
        Tile(
            "Break-even cost", break_even_words(assessment), f"paid on average {own.cost_bps:.1f} bps per unit traded"
        ),
    ]


def break_even_words(assessment: Assessment) -> str:
    found = assessment.break_even_bps
    if found is None:
        return "no trade"
    if found == 0.0:
        return "none"
    return f"{found:.1f} bps" if found < MAX_BREAK_EVEN_BPS else "> 10,000 bps"


def cautions(assessment: Assessment) -> list[str]:
    """What a reader should know even when the verdict is good."""
    found = []
    base = measures.total_return(assessment.strategy.returns)
    if base > 0.0:
        total = {stress.name: measures.total_return(stress.result.returns) for stress in assessment.stress}
        words = {"2 x costs": "At twice the costs nothing is left.", "one bar late": "One bar late, nothing is left."}
        found += [text for name, text in words.items() if total.get(name, 1.0) <= 0.0]
    elif assessment.break_even_bps == 0.0:
        found.append("It loses money even without costs.")
    if assessment.overfitting is not None and assessment.overfitting > 0.5:
        found.append(
            f"Picking the best of the trials on these bars picks luck: overfitting {assessment.overfitting:.0%}."
        )
    if not all(held for _, held in assessment.checks):
        found.append("A leak test failed: see integrity. Do not believe any figure of this page.")
    if assessment.calibration is not None and assessment.calibration.worst > 0.1:
        found.append(f"The predicted quantiles are off by up to {assessment.calibration.worst:.0%}.")
    return found


def promise_words(assessment: Assessment, training: TrainingRecord) -> str | None:
    """Whether the CVaR limit of the training held out of sample, in one sentence; None without one."""
    promise = training.promise
    if promise is None:
        return None
    found, n = promise.kept(assessment.strategy.returns)
    said = f"CVaR {promise.alpha:.0%} of the return of {promise.period_bars:,} bars: the limit is {promise.limit:.2%}"
    if n == 0:
        return f"{said}; out of sample there is no whole period to judge it by."
    tail = n * promise.alpha
    weak = f", judged by only {tail:.1f} periods in the tail" if tail < 5 else ""
    verb = "held" if found >= promise.limit else "did not hold"
    return f"{said}, out of sample it was {found:.2%} over {n:,} periods: it {verb}{weak}."


def stress_table(assessment: Assessment) -> list[tuple[str, str, str, str, str]]:
    rate = assessment.strategy.bars_per_year
    return [
        (
            stress.name,
            percent(measures.total_return(stress.result.returns)),
            percent(measures.annual_return(stress.result.returns, rate)),
            ratio(measures.sharpe(stress.result.returns, rate)),
            percent(measures.max_drawdown(stress.result.returns)),
        )
        for stress in assessment.stress
    ]


def behaviour_figures(own: Backtest) -> list[tuple[str, str]]:
    held = np.where(np.abs(own.weights) > HELD, own.weights, 0.0)
    gross = np.abs(held).sum(axis=1)
    return [
        ("Mean holding time", f"{measures.holding_bars(held):,.1f} bars in one direction"),
        ("In the market", percent(float((gross > 0).mean()))),
        ("Mean gross exposure", percent(float(gross.mean()))),
        ("Mean net exposure", percent(float(held.sum(axis=1).mean()))),
        ("Bars with a trade", percent(float((own.turnover > 0).mean()))),
    ]


def alert_rows(training: TrainingRecord) -> list[tuple[str, str, str]]:
    """(name, step, text) of each alert; the text is whatever the run wrote beside the name."""
    rows = []
    for alert in training.alerts:
        name = str(alert.get("alert", alert.get("name", "alert")))
        words = [str(alert[key]) for key in ("meaning", "advice", "message") if alert.get(key)]
        rows.append((name, f"{alert.get('step', 0):,}", " ".join(words)))
    return rows


def integrity_rows(assessment: Assessment) -> list[tuple[str, str]]:
    subject, verdict = assessment.subject, assessment.verdict
    overfitting = (
        "needs two trials on the same bars" if assessment.overfitting is None else percent(assessment.overfitting)
    )
    return [
        ("Run", subject.run),
        ("Source", subject.source),
        ("Data", subject.data),
        ("Split", subject.split),
        ("Seed", str(subject.seed)),
        ("Agent", f"after {subject.step:,} environment steps"),
        ("Settings", subject.config),
        ("Trials on this data", f"{verdict.n_trials} different results in {verdict.n_looks} looks (trials.jsonl)"),
        ("Best of luck", f"the best of them without skill would reach a Sharpe ratio of {verdict.best_of_luck:.2f}"),
        ("Probability of backtest overfitting", overfitting),
        *subject.facts,
    ]


def measure_table(own: Backtest, hold: Backtest, matched: Backtest) -> list[tuple[str, str, str, str]]:
    return [(d.name, *(d.form(d.value(result)) for result in (own, hold, matched))) for d in DEFINITIONS]  # type: ignore[misc]


class Month(NamedTuple):
    """A cell of the heat map; `shade` is a colour class from -4 to 4, empty without bars."""

    text: str
    shade: str


def month_table(own: Backtest) -> list[tuple[int, list[Month], str]]:
    """Per year: twelve cells and the whole year."""
    found = measures.monthly_returns(own.returns, own.fill_at)
    sizes = np.abs(found.table[np.isfinite(found.table)])
    scale = float(np.quantile(sizes, 0.9)) if len(sizes) else 1.0
    rows = []
    for year, months in zip(found.years, found.table, strict=True):
        cells = [
            Month("", "") if np.isnan(value) else Month(signed(value), shade_of(value / scale if scale else 0.0))
            for value in months.tolist()
        ]
        rows.append((year, cells, signed(float(np.nanprod(1.0 + months) - 1.0))))
    return rows


def signed(value: float) -> str:
    return ("+" if value > 0.0 else "") + percent(value)


def shade_of(share: float) -> str:
    """'u1' .. 'u4' above zero, 'd1' .. 'd4' below, 'z' at zero."""
    level = min(4, int(np.ceil(abs(share) * 4)))
    return "z" if level == 0 else f"{'u' if share > 0 else 'd'}{level}"
