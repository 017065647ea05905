"""The kernels' own test program, built for several processors, and what must hold of every build."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AARCH64 = (
    "-DCMAKE_SYSTEM_NAME=Linux",
    "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
    "-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++",
    "-DCMAKE_EXE_LINKER_FLAGS=-static",
)

pytestmark = pytest.mark.slow


def need(*programs: str) -> None:
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.skip(f"this machine has no {', '.join(missing)}")


def run(*command: str | Path) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, *options: str) -> Path:
    run("cmake", "-S", ROOT, "-B", folder, "-G", "Ninja", "-DTAILGUARD_TEST_PROGRAM=ON", *options)
    run("cmake", "--build", folder)
    return folder / "test_kernels"


def test_every_level_of_this_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("cmake", "ninja", "c++", "nm")
    program = build(tmp_path)
    for level in ("0", "1", "2"):
        monkeypatch.setenv("TAILGUARD_LEVEL", level)
        assert "all checks passed" in run(program)
    objects = list(tmp_path.rglob("*_level.cpp.o"))
    shared = [line for path in objects for line in run("nm", "-C", path).splitlines() if " W " in line or " V " in line]
    assert objects
    assert not shared, "the linker may put code for a newer processor in place of: " + "\n".join(shared)


def test_the_x86_64_baseline_alone(tmp_path: Path) -> None:
    need("cmake", "ninja", "c++")
    assert "all checks passed" in run(build(tmp_path, "-DTAILGUARD_BASELINE_ONLY=ON"))


def test_aarch64_under_qemu(tmp_path: Path) -> None:
    need("cmake", "ninja", "aarch64-linux-gnu-g++")
    qemu = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if qemu is None:
        pytest.skip("this machine has no qemu-aarch64 (Debian's qemu-user-static)")
    assert "all checks passed" in run(qemu, build(tmp_path, *AARCH64))
