"""Installing the package where there is no compiler, and building in place again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    env = {**os.environ, "PYTHONPATH": "", **environment}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """What a source distribution of this checkout holds."""
    copy = tmp_path / "sources"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for name in ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", "Makefile"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.mark.parametrize("compiler", ["/bin/false", ""])
def test_a_wheel_with_and_without_a_compiler(sources: Path, tmp_path: Path, compiler: str) -> None:
    if not compiler and shutil.which("c++") is None:
        pytest.skip("this machine has no C++ compiler")
    options = "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path / "wheels"
    environment = {"CXX": compiler} if compiler else {}
    run(sys.executable, "-m", "pip", "wheel", *options, sources, cwd=tmp_path, **environment)
    (wheel,) = (tmp_path / "wheels").iterdir()
    installed = tmp_path / "installed"
    with ZipFile(wheel) as archive:
        archive.extractall(installed)
    code = (
        "import numpy as np, tailguard\n"
        "from tailguard import kernels; from tailguard.kernels.scans import reverse_scan\n"
        "assert tailguard.__file__.startswith(__import__('os').getcwd())\n"
        "print(kernels.status(), reverse_scan(np.ones((2, 1)), np.ones((2, 1)), np.ones(1))[0, 0])"
    )
    status = run(sys.executable, "-c", code, cwd=installed, PYTHONPATH=str(installed))
    assert status.startswith("without the native core (it was not built" if compiler else "native core for ")
    assert status.endswith(" 3.0\n")
    assert wheel.name.endswith("-none-any.whl") == bool(compiler)
    assert not list(installed.rglob("*.cpp"))


def test_make_core_builds_in_place_and_takes_a_failed_build_away(sources: Path) -> None:
    if shutil.which("c++") is None or shutil.which("make") is None:
        pytest.skip("this machine has no C++ compiler or no make")
    folder, environment = sources / "src/tailguard/kernels", Path(sys.executable).parents[1]
    run("make", "core", f"VENV={environment}", cwd=sources)
    assert len(list(folder.glob("_native*.so"))) == 1
    code = "from tailguard import kernels; print(kernels.stale())"
    assert run(sys.executable, "-c", code, cwd=sources, PYTHONPATH=str(sources / "src")) == "False\n"
    kernel = folder / "native/scans.cpp"
    kernel.write_text(kernel.read_text() + "// edited\n")
    assert run(sys.executable, "-c", code, cwd=sources, PYTHONPATH=str(sources / "src")) == "True\n"
    run("make", "core", f"VENV={environment}", cwd=sources)
    assert run(sys.executable, "-c", code, cwd=sources, PYTHONPATH=str(sources / "src")) == "False\n"
    command, env = ["make", "core", f"VENV={environment}"], {**os.environ, "CXX": "/bin/false"}
    failed = subprocess.run(command, cwd=sources, env=env, capture_output=True, text=True, check=False)
    assert failed.returncode != 0
    assert "The native core was not built" in failed.stdout
    assert not list(folder.glob("_native*.so"))
