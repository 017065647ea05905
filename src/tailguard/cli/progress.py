"""How a training is watched from a terminal: a live line, JSON lines, or nothing but warnings."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tailguard.run import Listener, Update

LINES = 20  # over a whole training, where there is no terminal to redraw


class Display:
    """The quiet display: alerts and nothing else, on stderr; the others say more."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, markup=False)
        self.listener = Listener(self.update, self.notice)

    @contextmanager
    def shown(self, step: int, total_steps: int) -> Iterator[None]:
        """While training."""
        yield

    def update(self, update: Update) -> None:
        """After every update."""
        for alert in update.alerts:
            text = alert.sentence(update.row.get(alert.metric.name), f"update {update.since[alert.name]}")
            self.console.print(text, soft_wrap=True)

    def notice(self, text: str) -> None:
        """Something about the run as a whole."""


class JsonDisplay(Display):
    """One JSON line per update on stdout, for programs; notices on stderr."""

    def update(self, update: Update) -> None:
        saved = str(update.checkpoint) if update.checkpoint is not None else None
        alerts = [alert.name for alert in update.alerts]
        line = {**update.row, "total_steps": update.total_steps, "alerts": alerts, "checkpoint": saved}
        print(json.dumps(line), flush=True)

    def notice(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class LiveDisplay(Display):
    """A line that redraws itself: steps, steps per second, time left, return, explained variance, alerts."""

    def __init__(self) -> None:
        super().__init__()
        self.console = Console(highlight=False, markup=False)
        self.bar = Progress(
            BarColumn(bar_width=4),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[figures]}", markup=False),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task: TaskID | None = None
        self.n_alerts, self.next_line = 0, 0

    @contextmanager
    def shown(self, step: int, total_steps: int) -> Iterator[None]:
        self.task = self.bar.add_task("training", total=total_steps, completed=step, figures="first rollout")
        with self.bar:
            yield

    def update(self, update: Update) -> None:
        super().update(update)
        self.n_alerts += len(update.alerts)
        figures = line_of(update, self.n_alerts)
        if self.task is not None:
            self.bar.update(self.task, completed=min(update.step, update.total_steps), figures=figures)
        if not self.console.is_terminal and update.step >= self.next_line:
            self.console.print(figures, soft_wrap=True)
            self.next_line += update.total_steps // LINES

    def notice(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)


def line_of(update: Update, n_alerts: int) -> str:
    """One update in one line that fits a terminal of 80 columns; `explained` is the share of variance."""
    row = update.row
    cvar = row.get("risk/period_cvar", row.get("risk/predicted_cvar"))
    tail = f"CVaR {number(cvar)} " if cvar is not None else ""
    return (
        f"{update.step:,}/{update.total_steps:,} steps {row['time/fps']:,.0f}/s "
        f"return {number(row.get('rollout/ep_rew_mean'))} {tail}"
        f"explained {number(row.get('train/explained_variance'))} alerts {n_alerts}"
    )


def number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "-"


def display_of(kind: str) -> Display:
    """The display of that kind: live, json or quiet."""
    return {"live": LiveDisplay, "json": JsonDisplay, "quiet": Display}[kind]()
