"""Points of the sweeps, and what a measurement of one says."""

from __future__ import annotations

from benchmarks.scaling.measure import cost
from benchmarks.scaling.points import SWEEPS, Point


def test_a_sweep_varies_one_size_alone() -> None:
    for sweep in SWEEPS:
        for value, point in sweep.points():
            assert getattr(point, sweep.field) == value
            changed = {name for name in vars(point) if getattr(point, name) != getattr(sweep.base, name)}
            assert changed <= {sweep.field}


def test_a_point_is_measured_by_both_clocks() -> None:
    found = cost(Point(n_envs=2, n_steps=4, hidden=8, quantiles=4, bars=1_000), seconds=0.0)
    assert 0.0 < found["cpu"] < 60.0
    assert found["steps_per_second"] == 8 / found["wall"]
