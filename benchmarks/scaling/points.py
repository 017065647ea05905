"""What is varied: one size at a time, the others as they are in the middle."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Point:
    """Sizes of one measurement."""

    n_envs: int = 64
    n_steps: int = 64
    hidden: int = 64
    quantiles: int = 32
    assets: int = 1
    bars: int = 20_000


@dataclass(frozen=True)
class Sweep:
    """One size over its values."""

    key: str
    title: str
    field: str
    values: tuple[int, ...]
    base: Point

    def points(self, most: int | None = None) -> list[tuple[int, Point]]:
        """Values and their points; `most` leaves out larger values."""
        kept = [value for value in self.values if most is None or value <= most]
        return [(value, replace(self.base, **{self.field: value})) for value in kept]


MIDDLE = Point()
SWEEPS = (
    Sweep("envs", "environments", "n_envs", (1, 4, 16, 64, 256, 1024, 4096), Point(n_steps=32)),
    Sweep("steps", "steps per rollout", "n_steps", (32, 128, 512, 2048, 8192), Point(n_envs=8)),
    Sweep("hidden", "width of the LSTM", "hidden", (16, 64, 128, 256, 512), MIDDLE),
    Sweep("quantiles", "quantiles per critic", "quantiles", (21, 51, 101, 201), MIDDLE),
    Sweep("assets", "assets", "assets", (1, 2, 4, 8, 16), MIDDLE),
    Sweep("bars", "bars", "bars", (1_000, 10_000, 100_000, 1_000_000, 10_000_000), MIDDLE),
    Sweep("envs-on-many-bars", "environments on 1,000,000 bars", "n_envs", (1, 1024), Point(n_steps=32, bars=10**6)),
)
