"""sb3-contrib's RecurrentPPO: one actor, one scalar critic, each with an LSTM; its defaults otherwise."""

from __future__ import annotations

from typing import Any

import torch
from sb3_contrib import RecurrentPPO

from benchmarks.peers.cases import NET_ARCH, Case


def make(case: Case, env: Any, epochs: int, threads: int) -> RecurrentPPO:
    torch.set_num_threads(threads)
    return RecurrentPPO(
        "MlpLstmPolicy",
        env,
        n_steps=case.n_steps,
        batch_size=case.batch,
        n_epochs=epochs,
        policy_kwargs={"lstm_hidden_size": case.hidden, "net_arch": NET_ARCH},
        seed=0,
        device="cpu",
    )
