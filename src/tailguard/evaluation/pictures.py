"""The charts of a report: which series of an assessment go into which picture, and how to read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from tailguard.evaluation import charts, measures
from tailguard.evaluation.assessment import Assessment
from tailguard.evaluation.attack_record import AttackRecord
from tailguard.evaluation.backtest import Backtest
from tailguard.evaluation.charts import Line
from tailguard.evaluation.definitions import ALPHA, percent
from tailguard.evaluation.training_record import TrainingRecord

Array = npt.NDArray[np.float64]

MOST_WEIGHT_LINES = 6


class Chart(NamedTuple):
    """A picture, what its lines are, and one sentence on how to read it."""

    key: str
    title: str
    svg: Markup
    legend: tuple[tuple[str, str], ...]  # (style, label)
    reading: str


def performance_charts(assessment: Assessment, matched: Backtest) -> list[Chart]:
    own, hold = assessment.strategy, assessment.hold
    bars = own.fill_at
    stamps = np.concatenate([[bars[0] - (bars[1] - bars[0] if len(own) > 1 else np.timedelta64(1, "h"))], bars])
    lines = [
        Line("agent", own.equity, "s1"),
        Line("buy and hold", hold.equity, "s2"),
        Line("buy and hold at equal volatility", matched.equity, "s3"),
    ]
    highest = max(float(line.y.max()) for line in lines)
    lowest = min(float(line.y.min()) for line in lines)
    marks = [(own.fill_at[fold.first], fold.name) for fold in assessment.folds]
    end = ", ".join(f"{line.label} {line.y[-1]:.2f}" for line in lines)
    under = [
        Line("agent", measures.drawdowns(own.returns), "s1"),
        Line("buy and hold", measures.drawdowns(hold.returns), "s2"),
    ]
    return [
        Chart(
            "equity",
            "Growth of 1, net of costs",
            charts.time_chart(
                "Growth of 1 after costs",
                f"At the end: {end}.",
                stamps,
                lines,
                lambda v: f"{v:g}",
                log=lowest > 0 and highest / lowest > 3,
                marks=marks,
            ),
            legend(lines),
            what_was_known(assessment),
        ),
        Chart(
            "underwater",
            "Underwater: distance from the last high",
            charts.time_chart(
                "Distance from the last high",
                f"Deepest: {percent(measures.max_drawdown(own.returns))}.",
                stamps,
                under,
                lambda v: f"{v:.0%}",
                fill=True,
                height=170,
            ),
            legend(under),
            f"The longest wait for a new high was {measures.longest_drawdown_bars(own.returns):,} bars.",
        ),
    ]


def what_was_known(assessment: Assessment) -> str:
    if assessment.subject.in_sample:
        return "In sample: the agent learned from these bars."
    if assessment.folds:
        return "Each fold was traded by an agent that had only seen bars before it."
    return "Out of sample: no bar shown here was seen in training."


def risk_charts(assessment: Assessment, training: TrainingRecord) -> list[Chart]:
    own = assessment.strategy
    edge, tail = measures.value_at_risk(own.returns, ALPHA), measures.cvar(own.returns, ALPHA)
    found = [
        Chart(
            "returns",
            "Returns of a bar",
            charts.histogram(
                "How often each return of a bar occurred",
                f"VaR 5 % {edge:.2%}, CVaR 5 % {tail:.2%}.",
                own.returns,
                [(edge, f"VaR {edge:.2%}"), (tail, f"CVaR {tail:.2%}")],
                lambda v: f"{v:.2%}",
            ),
            (),
            "CVaR is the mean of everything left of VaR.",
        )
    ]
    if assessment.calibration is not None:
        levels, shares = (np.array(x) for x in (assessment.calibration.levels, assessment.calibration.coverage))
        found.append(
            Chart(
                "calibration",
                "Predicted against realised quantiles",
                charts.level_chart(
                    "Predicted against realised quantiles",
                    f"Largest distance from the diagonal {assessment.calibration.worst:.0%}, over "
                    f"{assessment.calibration.n_predictions:,} predictions.",
                    levels,
                    shares,
                    "predicted level",
                    "share of outcomes below",
                ),
                (("dot-key", "a quantile of the critics"), ("mark-key", "perfect")),
                "On the diagonal the critics are right; above it in the lower left they promise too much safety.",
            )
        )
    steps, period = training.series("risk/period_cvar")
    if len(steps) > 1:
        lines = [Line("CVaR of recent risk periods", period, "s1")]
        if training.promise is not None:
            lines.append(Line("limit", np.full(len(steps), training.promise.limit), "s2"))
        dual_steps, dual = training.series("risk/dual")
        found.append(
            Chart(
                "cvar-path",
                "CVaR while training",
                charts.curve_chart(
                    "CVaR of risk periods while training",
                    f"At the end {period[-1]:.4f}.",
                    steps,
                    lines,
                    lambda v: f"{v:.3g}",
                    thousands,
                ),
                legend(lines),
                f"The price of the limit ended at {dual[-1]:.3g}." if len(dual_steps) else "In reward units.",
            )
        )
    return found


def cost_charts(assessment: Assessment) -> list[Chart]:
    names = [stress.name for stress in assessment.stress]
    values = [measures.sharpe(stress.result.returns, assessment.strategy.bars_per_year) for stress in assessment.stress]
    said = ", ".join(f"{name} {value:.2f}" for name, value in zip(names, values, strict=True))
    title = "Sharpe ratio of the same decisions at other costs"
    chart = charts.bar_chart(title, f"{said}.", names, values, lambda v: f"{v:.2f}")
    return [Chart("costs", title, chart, (), "Only the costs differ; the last one trades one bar late.")]


def behaviour_charts(assessment: Assessment) -> list[Chart]:
    own = assessment.strategy
    gross, net = np.abs(own.weights).sum(axis=1), own.weights.sum(axis=1)
    found = []
    if len(own.symbols) > 1:
        lines = [Line("gross exposure", gross, "s1"), Line("net exposure", net, "s2")]
        found.append(_over_time("exposure", "Exposure", own, lines, "Sum of the sizes of all weights, and their sum."))
    size = np.abs(own.weights).mean(axis=0)
    chosen = sorted(np.argsort(-size, kind="stable")[:MOST_WEIGHT_LINES].tolist())
    lines = [Line(own.symbols[a], own.weights[:, a], f"s{i + 1}") for i, a in enumerate(chosen)]
    more = f" The {len(chosen)} largest of {len(own.symbols)}." if len(own.symbols) > len(chosen) else ""
    found.append(_over_time("weights", "Weights held", own, lines, f"Part of equity, negative when short.{more}"))
    daily = moving_mean(own.turnover, max(1, len(own) // 100))
    found.append(
        _over_time(
            "turnover",
            "Turnover per bar, smoothed",
            own,
            [Line("turnover", daily, "s1")],
            "Traded notional over equity.",
        )
    )
    return found


def _over_time(key: str, title: str, own: Backtest, lines: Sequence[Line], reading: str) -> Chart:
    spread = ", ".join(f"{line.label} from {line.y.min():.2f} to {line.y.max():.2f}" for line in lines)
    svg = charts.time_chart(title, f"{spread}.", own.fill_at, lines, lambda v: f"{v:.0%}", height=190)
    return Chart(key, title, svg, legend(lines) if len(lines) > 1 else (), reading)


def attack_charts(record: AttackRecord | None) -> list[Chart]:
    """What is left of an episode's return against the size of the perturbation, one chart per unit."""
    found: list[Chart] = []
    units = {"normalized": "Attacks on what the policy sees", "bps": "Attacks on prices"}
    for unit, title in units.items():
        curves = [curve for curve in (record.curves if record else ()) if curve.unit == unit and len(curve.points) > 1]
        if not curves:
            continue
        sizes = np.array([point.epsilon for point in curves[0].points])
        lines = [
            Line(curve.name, np.array([point.mean_return for point in curve.points]), f"s{i + 1}")
            for i, curve in enumerate(curves)
        ]
        left = ", ".join(f"{line.label} {line.y[-1]:.3g}" for line in lines)
        said = f"From {lines[0].y[0]:.3g} without an attack to {left} at {sizes[-1]:g}."
        svg = charts.curve_chart(title, said, sizes, lines, lambda v: f"{v:.3g}", lambda v: f"{v:g}")
        words = "basis points" if unit == "bps" else "units of the observations the policy sees"
        found.append(
            Chart(f"attacks-{unit}", title, svg, legend(lines), f"Return of an episode against the size in {words}.")
        )
    return found


HEALTH = (
    ("rollout/ep_rew_mean", "Return of an episode while exploring"),
    ("train/explained_variance", "Explained variance of the critics"),
    ("train/approx_kl", "Step of the policy (KL)"),
    ("train/entropy", "Entropy of the policy"),
)


def health_charts(training: TrainingRecord) -> list[Chart]:
    found: list[Chart] = []
    for name, title in HEALTH:
        steps, values = training.series(name)
        if len(steps) < 2:
            continue
        svg = charts.curve_chart(
            title,
            f"From {values[0]:.3g} to {values[-1]:.3g}.",
            steps,
            [Line(name, values, "s1")],
            lambda v: f"{v:.3g}",
            thousands,
        )
        found.append(Chart(f"health-{len(found)}", title, svg, (), name))
    return found


def legend(lines: Sequence[Line]) -> tuple[tuple[str, str], ...]:
    return tuple((line.style, line.label) for line in lines)


def thousands(value: float) -> str:
    return f"{value / 1000:,.0f}k" if value else "0"


def moving_mean(values: Array, window: int) -> Array:
    """Mean over the last `window` values; fewer at the start."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(1, len(values) + 1)
    before = np.maximum(index - window, 0)
    smooth: Array = (total[index] - total[before]) / (index - before)
    return smooth
