"""What importing a part of the package brings along: each takes a tenth of a second and more, at every start."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numba", "scipy", "matplotlib", "pandas", "stable_baselines3", "tensorboard", "ray", "rich", "jinja2")


@pytest.mark.parametrize(
    "line, allowed",
    [
        ("import tailguard", set()),
        ("import tailguard.market, tailguard.market.oracles", set()),
        ("import tailguard.env", {"torch", "stable_baselines3", "tensorboard", "rich"}),  # all by way of SB3's VecEnv
    ],
)
def test_importing_brings_nothing_heavy_along(line: str, allowed: set[str]) -> None:
    code = f"{line}; import sys; print(*(name for name in {HEAVY} if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(found) <= allowed
