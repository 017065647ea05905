"""The command line: exit codes, messages, and the demo end to end on a small budget."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tailguard import DistributionalPPO
from tailguard.cli.demo import run_demo
from tailguard.errors import ConfigError
from tailguard.presets import PRESETS, preset
from tailguard.run import RunFolder


def tailguard(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tailguard.cli", *arguments], cwd=cwd, capture_output=True, text=True, check=False
    )


def write_bars(path: Path, close: np.ndarray) -> Path:
    n = len(close)
    stamps = np.datetime64("2024-01-01T00:00", "ms") + np.arange(n) * np.timedelta64(1, "h")
    frame = pl.DataFrame(
        {
            "ts": [f"{stamp}Z" for stamp in stamps.astype("datetime64[s]").astype(str)],
            "open": close,
            "high": close + 1.0,
            "low": close - 1.0,
            "close": close,
            "volume": np.linspace(10.0, 20.0, n),
        }
    )
    frame.write_csv(path)
    return path


def prices(n: int = 300) -> np.ndarray:
    return 100.0 * np.exp(np.cumsum(np.random.default_rng(0).normal(0.0, 0.01, n)))


def test_good_bars_pass_and_bad_ones_fail_with_the_row(tmp_path: Path) -> None:
    good = tailguard("data", "check", str(write_bars(tmp_path / "good.csv", prices())), cwd=tmp_path)
    assert good.returncode == 0, good.stdout + good.stderr
    broken = prices()
    broken[57] = -5.0
    bad = tailguard("data", "check", str(write_bars(tmp_path / "bad.csv", broken)), cwd=tmp_path)
    assert bad.returncode == 1
    assert "-5" in bad.stdout


@pytest.mark.parametrize("arguments", [("data", "check", "missing.csv"), ("demo", "--preset", "regim")])
def test_bad_input_is_one_clear_message_and_exit_code_two(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = tailguard(*arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("tailguard: ")
    assert result.stderr.count("\n") <= 3


def test_the_demo_trains_prints_and_leaves_an_agent_a_picture_and_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tailguard.examination.EXAM_BARS", 1_000)
    folder = RunFolder(tmp_path / "runs/demo")
    folder.create("preset: noise\n", {})  # an earlier demo is replaced
    (folder.path / "mine.txt").write_text("a file of the user stays")
    run_demo("regime", 0, 8_192, Path("runs/demo"))
    said = capsys.readouterr().out
    assert "fraction of the optimum" in said
    assert "report in runs/demo/report.html" in said
    assert (folder.path / "mine.txt").exists()
    assert "preset: regime" in folder.config_file.read_text()
    assert (folder.path / "learning_curve.svg").read_text().startswith("<?xml")
    assert DistributionalPPO.load(folder.last_checkpoint()).num_timesteps == 8_192
    assert "vidence of skill" in (folder.path / "report.html").read_text()


def test_help_has_examples(tmp_path: Path) -> None:
    assert "Example" in tailguard("demo", "--help", cwd=tmp_path).stdout


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_an_agent(name: str) -> None:
    agent = preset(name).agent(seed=0)
    assert agent.config == preset(name).config


def test_an_unknown_preset_is_refused_with_a_hint() -> None:
    with pytest.raises(ConfigError, match='Did you mean "signal"'):
        preset("signall")
