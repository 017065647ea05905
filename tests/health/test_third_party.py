"""The doctor on trading environments of others, as installed from PyPI: docs/doctor.md shows what it says."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

import tailguard
from benchmarks.env_speed import peers_python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def verdicts(env: str, folder: Path) -> tuple[int, dict[str, Any]]:
    """Exit code and verdicts by line; ours and torch are lent to the peers' virtual environment."""
    sources = [str(Path(tailguard.__file__).parents[1]), sysconfig.get_path("purelib")]
    command = [peers_python(), "-m", "tailguard.cli", "doctor", "--env", f"examples.third_party_envs:{env}"]
    done = subprocess.run(
        [*command, "--json", folder / "verdicts.json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sources)},
        capture_output=True,
        text=True,
    )
    lines = json.loads((folder / "verdicts.json").read_text())["lines"]
    return done.returncode, {line["name"]: line["verdict"] for line in lines}


def failures(found: dict[str, Any]) -> set[str]:
    return {name for name, verdict in found.items() if verdict["status"] == "fail"}


def test_gym_anytrading_leaves_its_fees_out_of_the_reward(tmp_path: Path) -> None:
    code, found = verdicts("anytrading", tmp_path)
    assert code == 1
    assert failures(found) == {"prices/costs"}
    figure = found["prices/costs"]["figure"]
    assert "total_profit falls from 1 to" in figure
    assert "trade_fee_bid_percent = 0.01" in figure


def test_gym_trading_env_fills_at_the_close_it_shows(tmp_path: Path) -> None:
    code, found = verdicts("trading_env", tmp_path)
    assert code == 1
    assert failures(found) == {"prices/fills"}
    assert "filled at the newest close in its own observation" in found["prices/fills"]["figure"]
    assert found["prices/costs"]["status"] == "pass"
