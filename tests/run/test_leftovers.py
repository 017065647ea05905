"""Nothing is left outside the run folder, and a machine whose package folder and home cannot be written works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tailguard

SOURCE = Path(tailguard.__file__).parent
TRAIN = """
import sys
from tailguard.cli import main
small = "gym_env=CartPole-v1 n_envs=4 "
small += "ppo.n_steps=32 ppo.sequence_length=8 ppo.n_epochs=1 policy_kwargs.lstm_hidden_size=8"
sys.argv = ["tailguard", "train", "--steps=128", "--run=first", *(f"--set={one}" for one in small.split())]
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
"""
DRAW = """
from tailguard.population.report import rendered, subplots
figure, (chart,) = subplots(1)
chart.set_ylabel("a word, which needs a font")
assert "<svg" in rendered(figure)
"""
LEARN = """
from tests.agents import tiny_agent
tiny_agent().learn(128)
"""


def run(code: str, place: Path, home: Path, source: Path = SOURCE.parent) -> str:
    """Python with another home and temporary folder; what it prints on standard error."""
    temporary = place / "tmp"
    temporary.mkdir(exist_ok=True)
    dropped = ("MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")
    given = {name: value for name, value in os.environ.items() if name not in dropped}
    paths = [str(source), *os.environ.get("PYTHONPATH", "").split(os.pathsep), str(Path(__file__).parents[2])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=place,
        env={**given, "HOME": str(home), "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("code", [TRAIN, DRAW, LEARN], ids=["train", "draw", "learn"])
def test_nothing_is_left_in_home_or_in_the_temporary_folder(tmp_path: Path, code: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    run(code, tmp_path, home)
    assert not list(home.rglob("*"))
    assert not list((tmp_path / "tmp").rglob("*"))
    assert {entry.name for entry in tmp_path.iterdir()} <= {"home", "tmp", "runs"}


@pytest.mark.parametrize("code", [TRAIN, DRAW], ids=["train", "draw"])
def test_a_home_that_cannot_be_written_costs_nothing(tmp_path: Path, code: str) -> None:
    home = tmp_path / "home"
    home.write_text("a file, in which no folder can be made")
    assert "matplotlib" not in run(code, tmp_path, home).lower()
    assert not list((tmp_path / "tmp").rglob("*"))


def test_folders_of_matplotlib_that_are_there_are_used(tmp_path: Path) -> None:
    home = tmp_path / "home"
    for kind in (".config", ".cache"):
        (home / kind / "matplotlib").mkdir(parents=True)
    (home / ".config" / "matplotlib" / "matplotlibrc").write_text("lines.linewidth: 7.5\n")
    run("import tailguard, matplotlib; assert matplotlib.rcParams['lines.linewidth'] == 7.5", tmp_path, home)


def test_a_package_that_cannot_be_written_trains(tmp_path: Path) -> None:
    """As root nothing refuses to be written, so a file stands where bytecode would be kept."""
    copy, home = tmp_path / "site" / "tailguard", tmp_path / "home"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    home.write_text("no folder")
    for folder in [copy, *(path for path in copy.rglob("*") if path.is_dir())]:
        (folder / "__pycache__").write_text("no folder")
    code = (
        "import sys\n"  # an editable install would find the checkout before this copy
        "sys.meta_path[:] = [finder for finder in sys.meta_path if 'editable' not in type(finder).__module__]\n"
        "import tailguard\n"
        f"assert tailguard.__file__.startswith({str(copy)!r})\n"
        "from tailguard.presets import preset\n"
        "assert len(preset('regime').market.bars(50, 0)) == 50\n" + LEARN
    )
    run(code, tmp_path, home, copy.parent)
    assert not list((tmp_path / "tmp").rglob("*"))
