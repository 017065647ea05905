"""An attack bench that is stopped goes on where it was, with the same figures; rows are told as they come."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailguard.errors import RunError
from tailguard.robustness.bench import AttackConfig
from tailguard.robustness.progress import FILE
from tailguard.robustness.runs import attack_run
from tailguard.run import RunFolder
from tests.runs import begin, tiny_experiment

CONFIG = AttackConfig(attacks=("random", "mad"), epsilons=(0.1, 0.2), seeds=2, episodes=2)


class Stopped(Exception):  # noqa: N818 (what a test stops with)
    """In the middle."""


def test_what_is_done_is_kept_and_not_done_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "first")
    begin(folder, tiny_experiment("cartpole", updates=2))
    told: list[tuple[str, float]] = []

    def stop(text: str) -> None:
        if text == "mad 0.1":
            raise Stopped

    with pytest.raises(Stopped):
        attack_run(folder, CONFIG, stop, lambda name, unit, point: told.append((name, point.epsilon)))
    assert told == [("nobody", 0.0), ("random", 0.1), ("random", 0.2)]
    file = folder.path / FILE
    before = file.read_bytes()
    assert before.count(b"\n") == 2 + 4 + 1
    file.write_bytes(before + b'{"agent": "tor')  # a kill in the middle of a line
    record = attack_run(folder, CONFIG)
    assert file.read_bytes().startswith(before)
    assert attack_run(folder, CONFIG) == record  # the torn line is gone
    file.unlink()
    assert attack_run(folder, CONFIG) == record
    lines = file.read_bytes()
    assert attack_run(folder, CONFIG) == record
    assert file.read_bytes() == lines  # nothing was played again
    file.write_bytes(lines.replace(b'"returns": [', b'"returns": ["x", ', 1))
    with pytest.raises(RunError, match="line 1: returns is"):
        attack_run(folder, CONFIG)
