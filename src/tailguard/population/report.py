"""The report of a population: scores, who copied whom, and how the settings moved, in one HTML file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from tailguard.checkpoint import write_file
from tailguard.population.config import PopulationConfig
from tailguard.population.history import Finished, ancestry, history, latest
from tailguard.population.journal import Journal
from tailguard.population.scheduler import PBTScheduler
from tailguard.population.space import HyperparamConfig
from tailguard.run import RunFolder

OTHERS, BEST, COPY = "#9aa7b4", "#2a7f4f", "#c0392b"
FIGURES = {"return": "rollout/ep_rew_mean", "value loss": "train/value_loss", "explained": "train/explained_variance"}
"""Metrics of a member's last update in the table; population.jsonl has all of them."""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Population {{ name }}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1c2733; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid #dde3e9; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
</style></head><body>
<h1>Population {{ name }}</h1>
<p>{{ summary }}</p>
<table><thead><tr>
{%- for name in columns %}<th>{{ name }}</th>{% endfor %}</tr></thead><tbody>
{%- for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor %}
</tbody></table>
<h2>Scores and copies</h2>
<p>A line per member; an arrow is an exploit: the member at its point goes on as a copy of the one it starts from. The
path that led to the best member is drawn thick.</p>
{{ lineage }}
<h2>How the settings moved</h2>
<p>Every member's settings by round; thick, those that the best member was trained with, through every copy.</p>
{{ schedules }}
</body></html>
"""


def write_report(folder: Path, config: PopulationConfig, scheduler: PBTScheduler) -> Path:
    """report.html, lineage.svg and schedules.svg in the population's folder."""
    segments = history(Journal(RunFolder(folder).population_journal).read())
    best = scheduler.best
    path = ancestry(segments, best.index) if best is not None else []
    pictures = {
        "lineage": lineage_picture(segments, path),
        "schedules": schedule_picture(segments, path, config.population.hyperparams),
    }
    for name, svg in pictures.items():
        write_file(folder / f"{name}.svg", svg.encode())
    page = Environment(autoescape=True).from_string(PAGE)
    html = page.render(
        name=folder.name,
        summary=summary(config, scheduler, segments),
        columns=member_columns(config),
        rows=member_rows(scheduler, latest(segments)),
        **{name: Markup(svg[svg.index("<svg") :]) for name, svg in pictures.items()},  # noqa: S704 (our own drawing)
    )
    write_file(folder / "report.html", html.encode())
    return folder / "report.html"


def summary(config: PopulationConfig, scheduler: PBTScheduler, segments: Sequence[Finished]) -> str:
    """One sentence on what was done and what came of it."""
    best, n_copies = scheduler.best, sum(segment.source is not None for segment in segments)
    reached = "No member has a score." if best is None else f"Member {best.index} is best with {best.score:.4g}."
    return (
        f"{len(scheduler.members)} members, {len(segments)} segments of {config.population.perturbation_interval} "
        f"updates, {n_copies} copies, {scheduler.failed_ready_checks} failed readiness checks. {reached} "
        f"The score is the mean return per episode ({config.population.score})."
    )


def member_columns(config: PopulationConfig) -> list[str]:
    """What a table of members shows."""
    return ["member", "score", *(p.name for p in config.population.hyperparams), "parent", "state", *FIGURES, "alerts"]


def member_rows(scheduler: PBTScheduler, told: Mapping[int, Mapping[str, Any]]) -> list[list[str]]:
    """A row per member: score, settings, whose copy it is, state, and how its last update went."""
    best = scheduler.best
    return [
        [
            f"{member.index}{' (best)' if best is not None and member.index == best.index else ''}",
            "-" if member.score is None else f"{member.score:.4g}",
            *(shown(value) for value in member.hyperparameters.values()),
            "-" if member.parent is None else str(member.parent),
            member.state,
            *figures(told.get(member.index, {})),
        ]
        for member in scheduler.members
    ]


def figures(told: Mapping[str, Any]) -> list[str]:
    """How a member's last update went; dashes before its first."""
    metrics = told.get("metrics", {})
    values = [metrics.get(name) for name in FIGURES.values()]
    return ["-" if value is None else shown(float(value)) for value in values] + [str(len(told.get("alerts", [])))]


def shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def lineage_picture(segments: Sequence[Finished], path: Sequence[Finished]) -> str:
    """Scores by round, an arrow for every copy, the best member's way drawn thick."""
    figure, axes = subplots(1)
    chart = axes[0]
    scores = {(s.member, s.round): s.score for s in segments if s.score is not None}
    for member in sorted({segment.member for segment in segments}):
        rounds = sorted(r for m, r in scores if m == member)
        chart.plot(rounds, [scores[member, r] for r in rounds], color=OTHERS, marker=".", linewidth=1)
    for segment in segments:
        begins = max((r for m, r in scores if m == segment.source and r < segment.round), default=None)
        ends = scores.get((segment.member, segment.round))
        if segment.source is not None and begins is not None and ends is not None:
            arrow = {"arrowstyle": "->", "color": COPY, "linewidth": 1}
            chart.annotate("", (segment.round, ends), (begins, scores[segment.source, begins]), arrowprops=arrow)
    way = [(segment.round, segment.score) for segment in path if segment.score is not None]
    chart.plot([r for r, _ in way], [score for _, score in way], color=BEST, linewidth=2.5)
    chart.set_ylabel("score")
    chart.set_xlabel("round")
    return rendered(figure)


def schedule_picture(segments: Sequence[Finished], path: Sequence[Finished], space: Sequence[HyperparamConfig]) -> str:
    """One chart per setting: every member's value by round, and the best member's schedule thick."""
    figure, charts = subplots(len(space))
    for chart, parameter in zip(charts, space, strict=True):
        place = (lambda value, p=parameter: p.values.index(value)) if parameter.values is not None else float
        for member in sorted({segment.member for segment in segments}):
            own = [segment for segment in segments if segment.member == member]
            chart.plot(
                [s.round for s in own],
                [place(s.hyperparameters[parameter.name]) for s in own],
                color=OTHERS,
                linewidth=1,
                marker=".",
            )
        chart.plot(
            [s.round for s in path],
            [place(s.hyperparameters[parameter.name]) for s in path],
            color=BEST,
            linewidth=2.5,
            drawstyle="steps-mid",
        )
        if parameter.values is not None:
            chart.set_yticks(range(len(parameter.values)), [str(value) for value in parameter.values])
        elif parameter.log:
            chart.set_yscale("log")
        chart.set_ylabel(parameter.name)
    charts[-1].set_xlabel("round")
    return rendered(figure)


def subplots(n: int) -> tuple[Any, list[Any]]:
    """A figure of n charts, one above the other, without any state outside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 1.2 + 2.0 * n), layout="constrained")
    charts = figure.subplots(n, 1, squeeze=False, sharex=True)[:, 0]
    for chart in charts:
        chart.grid(alpha=0.25)
        chart.xaxis.get_major_locator().set_params(integer=True)
    return figure, list(charts)


def rendered(figure: Any) -> str:
    """The figure as SVG text, the same bits for the same data."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "tailguard", "svg.fonttype": "none"}):
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
