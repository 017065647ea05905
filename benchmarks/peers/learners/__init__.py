"""The learners compared: each module has `make(case, env, epochs, threads)`.

What it returns has `learn(steps)` and, for the clock, `collect_rollouts` and `train`; whatever is compiled for the case
is compiled when `make` or a first short `learn` is through.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from benchmarks.peers.cases import Case


@dataclass(frozen=True)
class Learner:
    """Where a learner is found and what it needs beside the project's own packages."""

    title: str
    module: str
    packages: tuple[str, ...] = ()

    def make(self, case: Case, env: Any, epochs: int, threads: int) -> Any:
        return import_module(f"benchmarks.peers.learners.{self.module}").make(case, env, epochs, threads)


OURS = "ours"
LEARNERS = {
    OURS: Learner("ours", "ours"),
    "recurrent_ppo": Learner("RecurrentPPO", "recurrent_ppo"),
}
