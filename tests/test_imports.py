"""What importing a part of the package brings along: each takes a tenth of a second and more, at every start."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "scipy", "matplotlib", "pandas", "stable_baselines3", "tensorboard", "ray", "rich", "jinja2")
BY_SB3 = {"torch", "stable_baselines3", "tensorboard", "rich"}


@pytest.mark.parametrize(
    "line, allowed",
    [
        ("import tailguard", set()),
        ("import tailguard.market, tailguard.market.oracles", set()),
        ("import tailguard.env", BY_SB3),
        ("from tailguard import DistributionalPPO", BY_SB3),
        ("import tailguard.cli.demo", BY_SB3 | {"jinja2"}),
    ],
)
def test_importing_brings_nothing_heavy_along(line: str, allowed: set[str]) -> None:
    code = f"{line}; import sys; print(*(name for name in {HEAVY} if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(found) <= allowed
