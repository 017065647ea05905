"""Whether the native core is there, fresh, and turned off on request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tailguard import kernels
from tailguard.kernels.core import cgroup_quota, source_digest


def in_a_new_process(code: str, **environment: str) -> str:
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_the_extension_was_built_of_the_sources_beside_it() -> None:
    assert not kernels.stale(), "stale build: run `make core`"


def test_a_changed_source_changes_the_digest(tmp_path: Path) -> None:
    source = tmp_path / "kernel.cpp"
    source.write_text("int one() { return 1; }")
    before = source_digest([source])
    source.write_text("int one() { return 2; }")
    assert source_digest([source]) != before


def test_a_stale_extension_says_so() -> None:
    if kernels.native() is None:
        pytest.skip(kernels.status())
    code = (
        "from tailguard.kernels import core; core.extension()[0].source_digest = 'of another day'; print(core.status())"
    )
    assert "STALE: run `make core`" in in_a_new_process(code)


def test_the_switch_turns_the_core_off_and_knows_only_two_words() -> None:
    code = "from tailguard import kernels; print(kernels.native(), kernels.status())"
    assert in_a_new_process(code, TAILGUARD_KERNELS="reference").startswith("None without the native core (TAILGUARD")
    assert "Use native (the default) or reference" in in_a_new_process(code, TAILGUARD_KERNELS="fast")


def test_older_instruction_sets_can_be_asked_for() -> None:
    if kernels.native() is None:
        pytest.skip(kernels.status())
    code = "from tailguard import kernels; print(kernels.native().level)"
    newest = in_a_new_process(code).strip()
    assert newest.startswith(in_a_new_process(code, TAILGUARD_LEVEL="0").strip())


@pytest.mark.parametrize(
    "files, quota",
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000", "box/cpu.max": "50000 100000", "box/job/cpu.max": "max 100000"}, 0.5),
        ({"cpu/cpu.cfs_quota_us": "200000", "cpu/cpu.cfs_period_us": "100000"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_quota_of_control_groups(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/box/job\n")
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    assert cgroup_quota(tmp_path / "root", membership) == quota


def test_available_cores_follow_the_affinity() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from tailguard.kernels import available_cores; print(available_cores())"
    )
    assert in_a_new_process(code).strip() == "1"
