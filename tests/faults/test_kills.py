"""K4: kill -9 and SIGTERM at random moments; every resume succeeds and the end is bit for bit the undisturbed one."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tailguard.run import RunFolder
from tests.faults.processes import started, stopped_after, timed
from tests.runs import whole_state

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("TAILGUARD_KILLS", "13"))  # for each of four settings: 52 in all
TERMS = 3
CHECKPOINTS = {"every_updates": 2, "keep_last": 2}


def rows(folder: RunFolder) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in folder.metrics_file.read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time" and not k.startswith("time/")} for line in lines]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("source", ["regime", "cartpole"])
def test_killed_and_resumed_runs_end_in_the_same_bits(tmp_path: Path, source: str, threads: int) -> None:
    settings = {"updates": 16, "ppo": {"torch_threads": threads}, "checkpoint": CHECKPOINTS}
    whole = RunFolder(tmp_path / "whole")
    seconds = timed(whole.path, source, settings)
    again = timed(tmp_path / "again", source, settings)  # the first also waits for the server
    expected = whole_state(whole.last_checkpoint())
    assert whole_state(RunFolder(tmp_path / "again").last_checkpoint()) == expected

    moments = random.Random(f"{source} {threads}")
    kills = terms = during_write = n_runs = 0
    while kills < KILLS or terms < TERMS:
        folder = RunFolder(tmp_path / f"run{n_runs}")
        n_runs += 1
        for attempt in range(40):
            number = signal.SIGTERM if terms < TERMS and moments.random() < 0.25 else signal.SIGKILL
            share = moments.uniform(0.0, 0.8 if attempt < 10 else 3.0)
            aim = folder.checkpoints if moments.random() < 0.3 else None
            if not stopped_after(started(folder.path, source, settings), share * min(seconds, again), number, aim):
                break
            kills, terms = kills + (number == signal.SIGKILL), terms + (number == signal.SIGTERM)
            during_write += any(entry.name.startswith(".step-") for entry in folder.path.glob("checkpoints/.*"))
            if number == signal.SIGTERM and folder.steps() and folder.steps()[-1] == whole.steps()[-1]:
                break
        else:
            pytest.fail("the run made no progress between kills")
        assert whole_state(folder.last_checkpoint()) == expected
        assert rows(folder) == rows(whole)
        assert not list(folder.checkpoints.glob(".*"))
    print(f"{source}, {threads} threads: {kills} kills ({during_write} in a write), {terms} SIGTERMs, {n_runs} runs")
