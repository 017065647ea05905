"""What `tailguard attack` found, as a report reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tailguard.errors import DataError
from tailguard.files import json_object, of_its_types, read_regular

FORMAT = 1
FILE = "attack.json"
LARGEST_RECORD = 2**26


@dataclass(frozen=True)
class Point:
    """One attack at one size."""

    epsilon: float
    mean_return: float
    cvar: float
    change: float
    """Mean |change of the action| per step and dimension."""
    by_seed: tuple[float, ...]


@dataclass(frozen=True)
class Curve:
    """One attack at all sizes, the first of which is 0."""

    name: str
    unit: str
    meaning: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Bound:
    """A proven bound on the change of the deterministic action; everything else here was only tried."""

    epsilon: float
    always: bool
    """Whether every observation since an episode's start may have moved, or only the present one."""
    n_steps: int
    mean: float
    largest: float
    range: float
    """Width of the action space: a bound as large says nothing."""

    @property
    def words(self) -> str | None:
        """The bound as a sentence; None when it says nothing."""
        if self.largest >= self.range:
            return None
        moved = "every observation since an episode's start" if self.always else "the present observation alone"
        return (
            f"moving {moved} by {self.epsilon:g} or less changes no action by more than {self.largest:.3g} on the "
            f"{self.n_steps} steps examined (interval propagation; the action space is {self.range:g} wide)"
        )


@dataclass(frozen=True)
class AttackRecord:
    """All of it."""

    alpha: float
    seeds: int
    episodes: int
    curves: tuple[Curve, ...]
    bounds: tuple[Bound, ...] = ()

    @property
    def strongest(self) -> Mapping[str, tuple[str, Point]]:
        """Per unit: the attack that left the least at its largest size."""
        found: dict[str, tuple[str, Point]] = {}
        for curve in self.curves:
            last = curve.points[-1]
            if curve.unit not in found or last.mean_return < found[curve.unit][1].mean_return:
                found[curve.unit] = curve.name, last
        return found


def read_record(folder: Path) -> AttackRecord | None:
    """What is in a run's evaluation folder; None when nobody attacked the run."""
    path = folder / FILE
    if not path.is_file():
        return None
    said = json_object(read_regular(path, LARGEST_RECORD, DataError), str(path), DataError, or_nan=True)
    if said.pop("format", None) != FORMAT:
        raise DataError(f"{path} was written by another version. Run `tailguard attack` again.")
    try:
        curves = tuple(checked_curve(curve) for curve in said["curves"])
        bounds = tuple(of_its_types(Bound(**bound)) for bound in said["bounds"])
        record = of_its_types(AttackRecord(**{**said, "curves": curves, "bounds": bounds}))
        if not curves:
            raise ValueError("it has no curves")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"{path} is not a record of attacks: {error}. Run `tailguard attack` again.") from None
    return record


def checked_curve(said: Mapping[str, Any]) -> Curve:
    """A curve with points, all of them numbers."""
    points = tuple(of_its_types(Point(**{**point, "by_seed": tuple(point["by_seed"])})) for point in said["points"])
    if not points or not all(isinstance(mean, int | float) for point in points for mean in point.by_seed):
        raise TypeError("a curve without points, or a mean that is no number")
    return of_its_types(Curve(**{**said, "points": points}))
