"""sb3-contrib's RecurrentPPO: one actor, one scalar critic, each with an LSTM; its defaults otherwise."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch
from sb3_contrib import RecurrentPPO

from benchmarks.peers.cases import NET_ARCH, Case, Work


class Shortened(RecurrentPPO):
    """Runs some batches of an epoch; arrays are prepared with the rollout, so that preparing them counts once."""

    batches: int

    def collect_rollouts(self, *args: Any, **kwargs: Any) -> bool:
        going_on = super().collect_rollouts(*args, **kwargs)
        next(self.rollout_buffer.get(self.batch_size))
        return going_on

    def train(self) -> None:
        buffer, get = self.rollout_buffer, self.rollout_buffer.get
        buffer.get = lambda size: islice(get(size), self.batches)
        super().train()
        buffer.get = get


def make(case: Case, env: Any, work: Work, threads: int) -> RecurrentPPO:
    torch.set_num_threads(threads)
    whole = work.samples == case.rollout
    model = (RecurrentPPO if whole else Shortened)(
        "MlpLstmPolicy",
        env,
        n_steps=case.n_steps,
        batch_size=case.batch,
        n_epochs=work.epochs,
        policy_kwargs={"lstm_hidden_size": case.hidden, "net_arch": NET_ARCH},
        seed=0,
        device="cpu",
    )
    if not whole:
        model.batches = work.batches(case.batch)
    return model
