"""Charts as inline SVG: no script, no font, no file beside the page. Colours are CSS classes, so themes work.

Every chart has a title and a description for those who do not see it. A long series is thinned to what a screen can
show, keeping the highest and the lowest value of each stretch, so that no peak is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, floor, isfinite, log10

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

Array = npt.NDArray[np.float64]
Stamps = npt.NDArray[np.datetime64]
Format = Callable[[float], str]

WIDTH, HEIGHT = 720, 240
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 24
MAX_POINTS = 900


@dataclass(frozen=True)
class Line:
    """One series; `style` is its CSS class."""

    label: str
    y: Array
    style: str


@dataclass(frozen=True)
class Frame:
    """Where data lands on the page."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    height: int = HEIGHT
    log: bool = False

    def x(self, value: float) -> float:
        share = (value - self.x_low) / max(self.x_high - self.x_low, 1e-300)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_low, self.y_high
        if self.log:
            value, low, high = log10(max(value, 1e-12)), log10(low), log10(high)
        share = (value - low) / max(high - low, 1e-300)
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)


@dataclass
class Drawing:
    """Pieces of an SVG, in the order they are painted."""

    title: str
    description: str
    height: int = HEIGHT
    pieces: list[str] = field(default_factory=list)

    def add(self, piece: str) -> None:
        self.pieces.append(piece)

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "middle") -> None:
        self.add(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escape(words)}</text>')

    def x_tick(self, i: int, x: float, words: str) -> None:
        """A word under the chart; at the right edge it ends there, and a small screen shows every second one."""
        at_edge = x > WIDTH - RIGHT - 30
        style = "tick odd" if i % 2 else "tick"
        self.text(min(x, WIDTH - RIGHT), self.height - 7, words, style, "end" if at_edge else "middle")

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str) -> None:
        self.add(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{style}"/>')

    def render(self) -> Markup:
        label = f"{self.title}. {self.description}"
        return Markup(  # noqa: S704  every text that enters a piece is escaped
            f'<svg class="chart" viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(label)}">'
            f"<title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>{''.join(self.pieces)}</svg>"
        )


def time_chart(
    title: str,
    description: str,
    ts: Stamps,
    lines: Sequence[Line],
    form: Format,
    *,
    log: bool = False,
    fill: bool = False,
    marks: Sequence[tuple[np.datetime64, str]] = (),
    height: int = HEIGHT,
) -> Markup:
    """Series over time; `fill` paints the first down to zero, `marks` are upright lines with a word."""
    moments = ts.astype("datetime64[ms]").astype(np.int64).astype(np.float64)
    drawing = Drawing(title, description, height)
    low, high = limits([line.y for line in lines], log=log, zero=fill)
    frame = Frame(moments[0], moments[-1], low, high, height, log)
    y_axis(drawing, frame, form)
    for i, (at, words) in enumerate(time_ticks(ts[0], ts[-1])):
        place = frame.x(float(at.astype("datetime64[ms]").astype(np.int64)))
        drawing.line(place, TOP, place, height - BOTTOM, "grid")
        drawing.x_tick(i, place, words)
    for at, words in marks:
        place = frame.x(float(at.astype("datetime64[ms]").astype(np.int64)))
        drawing.line(place, TOP, place, height - BOTTOM, "mark")
        drawing.text(place + 3, TOP + 10, words, "tick", "start")
    for i, line in enumerate(lines):
        drawing.add(path(frame, moments, line, fill=fill and i == 0))
    return drawing.render()


def curve_chart(
    title: str, description: str, x: Array, lines: Sequence[Line], form: Format, x_form: Format, height: int = 180
) -> Markup:
    """Series over a number."""
    drawing = Drawing(title, description, height)
    low, high = limits([line.y for line in lines])
    frame = Frame(float(x[0]), float(x[-1]) if x[-1] > x[0] else float(x[0]) + 1.0, low, high, height)
    y_axis(drawing, frame, form)
    for i, tick in enumerate(nice_ticks(frame.x_low, frame.x_high, 6)):
        drawing.x_tick(i, frame.x(tick), x_form(tick))
    for line in lines:
        drawing.add(path(frame, x, line))
    return drawing.render()


def bar_chart(title: str, description: str, names: Sequence[str], values: Sequence[float], form: Format) -> Markup:
    """One bar per name, from zero, with its value written on it."""
    height = 200
    drawing = Drawing(title, description, height)
    low, high = limits([np.asarray(values, dtype=np.float64)], zero=True)
    frame = Frame(0.0, float(len(names)), low, high, height)
    y_axis(drawing, frame, form)
    for i, (name, value) in enumerate(zip(names, values, strict=True)):
        left, right, top, base = frame.x(i + 0.2), frame.x(i + 0.8), frame.y(max(value, 0.0)), frame.y(min(value, 0.0))
        style = "gain" if value >= 0 else "loss"
        drawing.add(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{max(base - top, 1.0):.1f}" '
            f'class="{style}"/>'
        )
        drawing.text(
            (left + right) / 2, max(top - 4, 9) if value >= 0 else min(base + 12, height - 26), form(value), "value"
        )
        drawing.text((left + right) / 2, height - 7, name, "tick")
    return drawing.render()


def histogram(title: str, description: str, values: Array, marks: Sequence[tuple[float, str]], form: Format) -> Markup:
    """How often each size of a value occurs; the outermost half per mille is gathered in the end bars."""
    height = 200
    drawing = Drawing(title, description, height)
    low, high = (float(q) for q in np.quantile(values, [0.0005, 0.9995]))
    low, high = min(low, *(1.6 * at for at, _ in marks), 0.0), max(high, 0.0)  # room for the words of the marks
    if not high > low:
        low, high = low - 1e-6, high + 1e-6
    counts, edges = np.histogram(np.clip(values, low, high), bins=60, range=(low, high))
    frame = Frame(low, high, 0.0, float(counts.max()) * 1.08 + 1e-9, height)
    for left, right, count in zip(edges[:-1], edges[1:], counts, strict=True):
        if count:
            top = frame.y(float(count))
            style = "loss" if right <= 1e-15 else "gain"
            drawing.add(
                f'<rect x="{frame.x(left):.1f}" y="{top:.1f}" width="{frame.x(right) - frame.x(left) - 0.5:.1f}" '
                f'height="{height - BOTTOM - top:.1f}" class="{style}"/>'
            )
    drawing.line(LEFT, height - BOTTOM, WIDTH - RIGHT, height - BOTTOM, "axis")
    for i, tick in enumerate(nice_ticks(low, high, 6)):
        drawing.x_tick(i, frame.x(tick), form(tick))
    for i, (at, words) in enumerate(marks):
        drawing.line(frame.x(at), TOP, frame.x(at), height - BOTTOM, "mark")
        drawing.text(frame.x(at) - 4, TOP + 12 + 20 * i, words, "tick", "end")
    return drawing.render()


def level_chart(title: str, description: str, promised: Array, found: Array, x_label: str, y_label: str) -> Markup:
    """Points that should lie on the diagonal of the unit square."""
    size = 300
    drawing = Drawing(title, description, size)
    frame = Frame(0.0, 1.0, 0.0, 1.0, size)
    y_axis(drawing, frame, lambda value: f"{value:.0%}")
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        drawing.text(frame.x(tick), size - 7, f"{tick:.0%}", "tick")
    drawing.line(frame.x(0), frame.y(0), frame.x(1), frame.y(1), "mark")
    for x, y in zip(promised.tolist(), found.tolist(), strict=True):
        drawing.add(f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.5" class="dot"/>')
    drawing.text(WIDTH - RIGHT - 4, size - BOTTOM - 6, x_label, "tick", "end")
    drawing.text(LEFT + 6, TOP + 10, y_label, "tick", "start")
    return drawing.render()


# --- pieces


def path(frame: Frame, x: Array, line: Line, *, fill: bool = False) -> str:
    """A polyline through the finite points, thinned."""
    keep = thinned(line.y, MAX_POINTS)
    points, pen = [], "M"
    for i in keep.tolist():
        value = float(line.y[i])
        if not isfinite(value):
            pen = "M"
            continue
        points.append(f"{pen}{frame.x(float(x[i])):.1f} {frame.y(value):.1f}")
        pen = "L"
    if not points:
        return ""
    whole = "".join(points)
    area = ""
    if fill:
        base = frame.y(0.0)
        first, last = frame.x(float(x[keep[0]])), frame.x(float(x[keep[-1]]))
        area = f'<path d="{whole}L{last:.1f} {base:.1f}L{first:.1f} {base:.1f}Z" class="area {line.style}"/>'
    return f'{area}<path d="{whole}" class="line {line.style}"/>'


def thinned(y: Array, most: int) -> npt.NDArray[np.int64]:
    """Indices to draw: all, or the lowest and highest of each of `most` / 2 stretches, and both ends."""
    n = len(y)
    if n <= most:
        return np.arange(n)
    edges = np.linspace(0, n, most // 2 + 1).astype(np.int64)
    kept = {0, n - 1}
    filled = np.where(np.isfinite(y), y, np.nanmin(y[np.isfinite(y)]) if np.isfinite(y).any() else 0.0)
    for start, stop in pairwise(edges):
        kept.add(int(start + filled[start:stop].argmin()))
        kept.add(int(start + filled[start:stop].argmax()))
    return np.array(sorted(kept))


def limits(series: Sequence[Array], *, log: bool = False, zero: bool = False) -> tuple[float, float]:
    """Lowest and highest value with a little room."""
    values = np.concatenate([np.asarray(y, dtype=np.float64)[np.isfinite(y)] for y in series] or [np.zeros(1)])
    if not len(values):
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    if log:
        low = max(low, 1e-9)
        return low / 1.02, max(high, low) * 1.02
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = 0.06 * (high - low) or max(abs(high) * 0.05, 1e-9)
    return (low - room if low < 0.0 or not zero else low), (high + room if high > 0.0 or not zero else high)


def y_axis(drawing: Drawing, frame: Frame, form: Format) -> None:
    ticks = log_ticks(frame.y_low, frame.y_high) if frame.log else nice_ticks(frame.y_low, frame.y_high, 5)
    for tick in ticks:
        at = frame.y(tick)
        drawing.line(LEFT, at, WIDTH - RIGHT, at, "axis" if tick == 0.0 else "grid")
        drawing.text(LEFT - 6, at + 3.5, form(tick), "tick", "end")


def nice_ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers inside [low, high]."""
    width = high - low
    if not width > 0.0:
        return [low]
    raw = width / about
    power = 10.0 ** floor(log10(raw))
    step = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= raw * 0.999)
    first = ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten, or powers alone, or every so many of them; round numbers where these are few."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    for factors in ((1.0, 2.0, 5.0), (1.0,)):
        ticks = [m * 10.0**power for power in powers for m in factors if low <= m * 10.0**power <= high]
        if len(ticks) <= 7:
            return ticks if len(ticks) >= 3 else nice_ticks(low, high, 5)
    return ticks[:: ceil(len(ticks) / 6)]


def time_ticks(first: np.datetime64, last: np.datetime64) -> list[tuple[np.datetime64, str]]:
    """Five to nine round dates with their words."""
    hours = float((last - first) / np.timedelta64(1, "h"))
    if hours > 24 * 365 * 3:
        unit, form = "Y", 4
        step = max(1, round(hours / (24 * 365) / 7))
    elif hours > 24 * 75:
        unit, form = "M", 7
        step = max(1, round(hours / (24 * 30) / 7))
    elif hours > 72:
        unit, form = "D", 10
        step = max(1, round(hours / 24 / 6))
    else:
        unit, form = "h", 13
        step = max(1, round(hours / 6))
    stamps = np.arange(first.astype(f"datetime64[{unit}]"), last.astype(f"datetime64[{unit}]") + 1, step)
    inside = [stamp for stamp in stamps if first <= stamp <= last]
    return [(stamp, str(stamp)[:form].replace("T", " ") + ("h" if unit == "h" else "")) for stamp in inside]
