"""The learners compared: each module has `make(case, env, work, threads)`.

What it returns has `learn(steps)` and, for the clock, `collect_rollouts` and `train`; whatever is compiled for the case
is compiled when `make` or a first short `learn` is through.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from benchmarks.peers.cases import Case, Work


@dataclass(frozen=True)
class Learner:
    """Where a learner is found and what it needs beside the project's own packages."""

    title: str
    module: str
    note: str
    packages: tuple[str, ...] = ()
    warm_up: int = 1  # small cycles before the clock starts; 0 where `make` compiles for the sizes of a case

    def make(self, case: Case, env: Any, work: Work, threads: int) -> Any:
        return import_module(f"benchmarks.peers.learners.{self.module}").make(case, env, work, threads)


OURS = "ours"
OWN = (OURS,)
WARM_UP = 3  # until episodes have ended: that too has compiled loops
LEARNERS = {
    OURS: Learner(
        "Ours",
        "ours",
        "twin critics of 32 quantiles, AdaptiveUPGD, gradient noise measured",
        warm_up=WARM_UP,
    ),
    "recurrent_ppo": Learner("RecurrentPPO", "recurrent_ppo", "sb3-contrib's"),
    "cleanrl": Learner(
        "CleanRL-style loop", "cleanrl_style", "one call of nn.LSTM per step, batches of whole environments"
    ),
    "torchrl": Learner("TorchRL", "torchrl_ppo", "its LSTMModule and ClipPPOLoss on sequences", ("torchrl==0.14.1",)),
    "jax": Learner(
        "JAX, jitted",
        "jax_ppo",
        "whole rollouts and updates compiled; the trading environment is stepped from the host",
        ("jax==0.10.2",),
        warm_up=0,
    ),
}
