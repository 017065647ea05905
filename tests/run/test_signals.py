"""Stop signals: what counts as one request, what stays ignored, and output whose reader has gone."""

from __future__ import annotations

import io
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tailguard.cli.streams import LastingStream
from tailguard.run import Listener, RunFolder, StoppedNow, Update
from tailguard.run.signals import ONE_HANGUP_S, StopRequests
from tests.cli.test_train import SMALL
from tests.runs import STEPS_PER_UPDATE, begin, go_on, tiny_experiment, whole_state


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.mark.parametrize("first", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_terminal_that_closes_sends_two_signals_and_they_are_one_request(first: signal.Signals) -> None:
    said: list[str] = []
    with StopRequests(said.append) as stop:
        send(first)
        send(signal.SIGHUP)
        assert stop.signum == first
        assert len(said) == 1
        stop.at -= 2 * ONE_HANGUP_S  # long ago
        with pytest.raises(StoppedNow, match="SIGHUP"):
            send(signal.SIGHUP)
    with StopRequests(said.append):
        send(signal.SIGTERM)
        with pytest.raises(StoppedNow, match="SIGINT"):
            send(signal.SIGINT)


def test_a_hangup_that_was_ignored_stays_ignored_and_handlers_come_back() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)}
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        with StopRequests(lambda text: None) as stop:
            send(signal.SIGHUP)
            assert not stop.requested
            send(signal.SIGTERM)
            assert stop.requested
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before[signal.SIGHUP])
    assert before == {number: signal.getsignal(number) for number in before}


def test_a_notice_that_cannot_be_printed_stops_the_training_all_the_same(tmp_path: Path) -> None:
    folder, experiment = RunFolder(tmp_path / "run"), tiny_experiment("regime")

    def gone(text: str) -> None:
        raise OSError(5, "Input/output error")

    def hang_up(update: Update) -> None:
        if update.step == 2 * STEPS_PER_UPDATE:
            send(signal.SIGHUP)

    outcome = begin(folder, experiment, Listener(update=hang_up, notice=gone))
    assert (outcome.finished, outcome.step, outcome.stopped_by) == (False, 3 * STEPS_PER_UPDATE, signal.SIGHUP)
    assert go_on(folder, experiment).finished


def test_a_stream_without_a_reader_takes_what_is_written_and_other_errors_are_raised() -> None:
    read_end, write_end = os.pipe()
    stream = LastingStream(os.fdopen(write_end, "w"))
    os.close(read_end)
    for _ in range(3):
        assert stream.write("to nobody\n") == 10
        stream.flush()
    stream.close()

    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        LastingStream(Full()).write("x")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tailguard.cli", *arguments]


def in_terminal(place: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """A command that controls a terminal of its own, and that terminal's other end."""
    ours, theirs = pty.openpty()
    options: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "cwd": place}

    def take_terminal() -> None:
        import fcntl
        import termios

        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        command(*arguments),
        start_new_session=True,
        preexec_fn=take_terminal,
        **options,
    )
    os.close(theirs)
    return process, ours


@pytest.mark.slow
@pytest.mark.parametrize("display", [(), ("--json",)])
def test_a_closed_terminal_ends_a_run_with_a_checkpoint(display: tuple[str, ...], tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "r")
    arguments = (*SMALL, f"--set=steps={400 * STEPS_PER_UPDATE}", "--set=checkpoint.every_updates=1000", *display)
    process, terminal = in_terminal(tmp_path, "train", *arguments, "--run", "r")
    try:
        read_until(terminal, b"explained" if not display else b"alerts")
        os.close(terminal)
        assert process.wait(60.0) == 0
    finally:
        process.kill()
        process.wait()
    assert len(folder.steps()) == 1
    assert 0 < folder.steps()[-1] < 400 * STEPS_PER_UPDATE


@pytest.mark.slow
def test_a_run_whose_output_nobody_reads_any_more_goes_on_and_ends_well(tmp_path: Path) -> None:
    with subprocess.Popen(
        command("train", *SMALL, "--json", "--run", "r"), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 0, said
    assert b"Broken" not in said
    assert RunFolder(tmp_path / "runs" / "r").steps()[-1] == 4 * STEPS_PER_UPDATE
    assert whole_state(RunFolder(tmp_path / "runs" / "r").last_checkpoint())


def read_until(terminal: int, words: bytes) -> None:
    seen = b""
    while words not in seen:
        seen += os.read(terminal, 4096)
