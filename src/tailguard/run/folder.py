"""The folder of a run: what lies where, who may write, which checkpoints there are.

runs/NAME/config.yaml          the resolved configuration
          manifest.json        versions, data hashes, seed, command
          metrics.jsonl        one line per update, the source of truth; tensorboard/ shows the same
          alerts.jsonl         one line per alert that began
          checkpoints/step-N/  bundles
          lock                 who writes
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tailguard.checkpoint import write_file
from tailguard.errors import ConfigError, RunError
from tailguard.files import read_json, refuse_unusable_path

STEP = re.compile(r"step-([0-9]{1,18})")


def run_path(name: str | Path) -> Path:
    """A run's folder: a name lives in `runs/`, a path is taken as it is."""
    refuse_unusable_path(name, what="The name of a run")
    place = Path(name)
    return place if place.is_absolute() or len(place.parts) != 1 or place.parts[0] in (".", "..") else "runs" / place


class RunFolder:
    """One run on disk; every path and every question about it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def handle(self) -> str:
        """What a user types to name this run: its name under runs/, otherwise its path."""
        return self.name if run_path(self.name) == self.path else str(self.path)

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def manifest_file(self) -> Path:
        return self.path / "manifest.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def alerts_file(self) -> Path:
        return self.path / "alerts.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def create(self, config_yaml: str, manifest: Mapping[str, Any]) -> None:
        """Write down what the run is; the configuration comes last, so a folder that has one is complete."""
        if self.config_file.exists():
            raise ConfigError(
                f"{self.path} already holds a run. Go on with `tailguard resume {self.name}`, or choose another --run."
            )
        write_file(self.manifest_file, json.dumps(manifest, indent=1).encode())
        write_file(self.config_file, config_yaml.encode())

    def manifest(self) -> dict[str, Any]:
        """What `create` wrote about where the run comes from; nothing where it is not there or cannot be read."""
        try:
            return read_json(self.manifest_file, RunError)
        except RunError:
            return {}

    @property
    def population_journal(self) -> Path:
        """Where a population keeps what happened; only a population has it."""
        return self.path / "population.jsonl"

    def require(self) -> None:
        """Refuse a folder that is no run."""
        if self.population_journal.is_file():
            raise ConfigError(
                f"{self.path} is a population, not a run. Its best member is the run {self.handle}-best, there when "
                f"the population has ended; `tailguard resume {self.handle}` goes on with it."
            )
        if not self.config_file.is_file():
            raise ConfigError(
                f"{self.path} is not a run: it has no config.yaml. Known runs: {', '.join(known_runs()) or 'none'}."
            )

    def require_single_agent(self) -> None:
        """Refuse a folder without one agent that could be used or trained on: no run, a population, a walk-forward."""
        self.require()
        if (self.path / "folds").is_dir():
            raise ConfigError(
                f"{self.path} is a walk-forward: every fold and seed has an agent of its own, for that test "
                f"alone, so there is no one agent to use here. When all folds are trained, `tailguard evaluate "
                f"{self.handle}` shows its curve and exports its weights; the `tailguard walk-forward` command that "
                "began it goes on with it; `tailguard train` makes one agent."
            )

    def steps(self) -> list[int]:
        """Steps of the checkpoints, ascending."""
        if not self.checkpoints.is_dir():
            return []
        found = (STEP.fullmatch(entry.name) for entry in self.checkpoints.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step}"

    def last_checkpoint(self) -> Path:
        """The newest bundle."""
        steps = self.steps()
        if not steps:
            raise ConfigError(f"{self.path} has no checkpoint yet. Let it train, or `tailguard resume {self.name}`.")
        return self.checkpoint(steps[-1])

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only writer; the system lets go when the process ends, however it ends."""
        file = self.path / "lock"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunError(f"Cannot write in {self.path}: {error.strerror}.") from None
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunError(
                    f"{self.path} is being written by {holder(handle)}. Wait for it to end or stop it, or choose "
                    "another --run."
                ) from None
            except OSError as error:
                raise RunError(f"{file} cannot be locked ({error.strerror}); choose a --run on a local disk.") from None
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
            yield
            os.ftruncate(handle, 0)
        finally:
            os.close(handle)


def holder(handle: int) -> str:
    """Who holds a lock, in words."""
    try:
        said = json.loads(os.pread(handle, 4096, 0))
        return f"process {int(said['pid'])} on host {str(said['host'])!r}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def known_runs() -> list[str]:
    """Names of the runs under `runs/`."""
    return sorted(file.parent.name for file in Path("runs").glob("*/config.yaml"))
