"""What an attack bench has done so far, in a run's folder: one line per attack, size and seed, so that it can go on."""

from __future__ import annotations

import json
import os
from collections import UserDict
from pathlib import Path

import numpy as np

from tailguard.checkpoint import read_manifest
from tailguard.errors import RunError
from tailguard.files import Fields, line_name, read_json_lines
from tailguard.robustness.play import Played

FILE = "attack-progress.jsonl"


class KeptEpisodes(UserDict[str, Played]):
    """Played episodes by attack, size and seed, of one agent; each is on the disk as soon as it is known."""

    def __init__(self, file: Path, agent: str) -> None:
        super().__init__()
        self.file, self.agent = file, ""
        for number, line in read_json_lines(file, RunError) if file.is_file() else ():
            fields = Fields(line, line_name(file, number), RunError)
            returns, lengths = (np.array(numbers_of(fields, name)) for name in ("returns", "lengths"))
            if fields.text("agent") == agent:  # others were played by another agent
                self[fields.text("key")] = Played(returns, lengths, fields.number("change"))
        self.agent = agent
        if file.is_file():
            with file.open("r+b") as opened:  # a line that a kill cut short never happened
                opened.truncate(opened.read().rfind(b"\n") + 1)

    def __setitem__(self, key: str, played: Played) -> None:
        super().__setitem__(key, played)
        if not self.agent:
            return  # it comes from the file
        figures = {"returns": played.returns.tolist(), "lengths": played.lengths.tolist(), "change": played.change}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"agent": self.agent, "key": key, **figures})
        with self.file.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def numbers_of(fields: Fields, name: str) -> list[float]:
    found = fields.values.get(name)
    if not isinstance(found, list) or not all(type(value) in (int, float) for value in found) or not found:
        raise fields.wrong(name, "a list of numbers")
    return found


def agent_digest(checkpoint: Path) -> str:
    """Which agent a bundle holds, by the checksums of its files."""
    files = read_manifest(checkpoint)["files"]
    return "-".join(str(files[name]["sha256"])[:16] for name in sorted(files))
