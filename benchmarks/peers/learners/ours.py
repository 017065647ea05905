"""Our learner with everything on that the speed goals name."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.cases import NET_ARCH, Case, Work
from tailguard import DistributionalPPO


def make(case: Case, env: Any, work: Work, threads: int) -> DistributionalPPO:
    """Twin critics of 32 quantiles, AdaptiveUPGD, and gradient noise measured, as it always is."""
    return DistributionalPPO(
        "MlpLstmPolicy",
        env,
        n_steps=case.n_steps,
        batch_size=case.batch,
        n_epochs=work.epochs,
        critic={"n_quantiles": 32, "twin": True},
        optimizer="adaptive_upgd",
        policy_kwargs={"lstm_hidden_size": case.hidden, "net_arch": NET_ARCH},
        update_threads=threads,
        seed=0,
    )
