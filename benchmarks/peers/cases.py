"""The work every learner is given: environments, sizes, epochs, batches."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

N_EPOCHS = 4
BATCH_SIZE = 1024
LAYERS = (64, 64)  # after the LSTM, of actor and critic alike
NET_ARCH = {"pi": list(LAYERS), "vf": list(LAYERS)}
SEQUENCE = 32  # steps through which gradients flow, where a learner cuts rollouts into sequences
LONG_ROLLOUT = 16_384  # samples from which one of a peer's epochs is timed and counted N_EPOCHS times
ENVS = ("trading", "cartpole")
N_BARS = 200_000


@dataclass(frozen=True)
class Case:
    """One cell of the grid."""

    env: str
    hidden: int
    n_envs: int
    n_steps: int

    @property
    def rollout(self) -> int:
        return self.n_envs * self.n_steps

    @property
    def batch(self) -> int:
        """Samples per gradient step: the whole rollout where that is less."""
        return min(BATCH_SIZE, self.rollout)

    @property
    def sequence(self) -> int:
        """Steps of a sequence that fit the rollout without a rest."""
        return gcd(SEQUENCE, self.n_steps)

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.hidden, self.n_envs, self.n_steps

    def peer_epochs(self) -> int:
        """Epochs of a peer that are really run."""
        return 1 if self.rollout >= LONG_ROLLOUT else N_EPOCHS


def make_env(case: Case) -> Any:
    """The very same environment for every learner, behind SB3's VecEnv."""
    if case.env == "trading":
        from tailguard.env import oracle_env
        from tailguard.market.oracles import oracle_market

        return oracle_env(oracle_market("regime"), n_envs=case.n_envs, seed=0, n_bars=N_BARS)
    from tests.environments import cartpole

    return cartpole(case.n_envs, seed=0)
