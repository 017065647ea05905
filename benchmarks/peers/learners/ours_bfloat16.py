"""Our learner, with bfloat16 factors in critics and on the way back."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.cases import Case, Work
from benchmarks.peers.learners import ours
from tailguard import DistributionalPPO


def make(case: Case, env: Any, work: Work, threads: int) -> DistributionalPPO:
    return ours.make(case, env, work, threads, precision="bfloat16")
