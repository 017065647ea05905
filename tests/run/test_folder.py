"""The run folder: one writer, clear refusals, records that can be cut."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tailguard.errors import CheckpointError, ConfigError, RunError
from tailguard.run import RunFolder, run_path
from tailguard.run.checkpoints import Mark, kept
from tailguard.run.records import cut

HOLD = """
import sys, time
from tailguard.run.folder import RunFolder
with RunFolder(sys.argv[1]).lock():
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_name_lives_under_runs_and_a_path_is_taken_as_it_is(tmp_path: Path) -> None:
    assert run_path("first") == Path("runs/first")
    assert run_path("elsewhere/first") == Path("elsewhere/first")
    assert run_path(tmp_path) == tmp_path
    assert run_path("..") == Path("..")


def test_a_second_writer_is_refused_with_pid_and_host_until_the_first_is_gone(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder, holder.stdout as said:
        assert said.readline() == "held\n"
        with pytest.raises(RunError, match=rf"process {holder.pid} on host '{socket.gethostname()}'"):
            RunFolder(tmp_path).lock().__enter__()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with RunFolder(tmp_path).lock():  # what a kill leaves behind is taken over
        assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
        with pytest.raises(RunError, match=f"process {os.getpid()}"):
            RunFolder(tmp_path).lock().__enter__()


def test_a_folder_that_holds_a_run_is_not_started_over(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create("preset: regime\n", {})
    with pytest.raises(ConfigError, match="tailguard resume run"):
        folder.create("preset: regime\n", {})


def test_a_folder_without_configuration_is_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RunFolder(run_path("known")).create("preset: regime\n", {})
    with pytest.raises(ConfigError, match="Known runs: known"):
        RunFolder(run_path("knwon")).require()


def test_steps_are_ordered_by_number_and_other_names_passed_over(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for name in ("step-900", "step-1000", "step-20", ".step-5-x", "damaged-step-7", "step-x"):
        (folder.checkpoints / name).mkdir(parents=True)
    assert folder.steps() == [20, 900, 1000]


def test_records_are_cut_after_a_step_and_a_torn_line_goes(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "tr')
    assert [row["step"] for row in cut(file, 2)] == [1, 2]
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_line_damaged_in_the_middle_is_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunError, match="line 2"):
        cut(file, 3)


@pytest.mark.parametrize(
    ("marks", "keep_last", "stay"),
    [
        ([Mark(1, 5.0, True), Mark(2, 1.0, True), Mark(3, 2.0, True)], 1, {1, 3}),
        ([Mark(1, 5.0, True), Mark(2, 5.0, True), Mark(3, 2.0, True)], 1, {2, 3}),
        ([Mark(1, None, True), Mark(2, None, False), Mark(3, None, False)], 2, {1, 2, 3}),
        ([Mark(1, None, True), Mark(2, None, True), Mark(3, None, False)], 1, {2, 3}),
        ([], 3, set()),
    ],
)
def test_the_last_the_best_and_the_last_exact_stay(marks: list[Mark], keep_last: int, stay: set[int]) -> None:
    assert kept(marks, keep_last) == stay


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="Cannot write in"):
        RunFolder(tmp_path / "file" / "run").lock().__enter__()
    with pytest.raises(CheckpointError, match=r"Cannot write .* bytes.*free"):
        RunFolder(tmp_path / "file" / "run").create("", {})


def test_a_run_is_named_the_way_a_user_would_type_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert RunFolder("runs/first").handle == "first"
    assert RunFolder(tmp_path / "elsewhere" / "first").handle == str(tmp_path / "elsewhere" / "first")
