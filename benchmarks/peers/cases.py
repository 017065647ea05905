"""The work every learner is given: environments, sizes, epochs, batches."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd
from typing import Any

N_EPOCHS = 4
BATCH_SIZE = 1024
LAYERS = (64, 64)  # after the LSTM, of actor and critic alike
NET_ARCH = {"pi": list(LAYERS), "vf": list(LAYERS)}
SEQUENCE = 32  # steps through which gradients flow, where a learner cuts rollouts into sequences
LONG_ROLLOUT = 16_384  # samples; of a longer update of a peer this many are timed, and the rest counted alike
SPAN = 1_000  # steps of each environment that a measurement covers; an episode of the trading environment has 250
ENVS = ("trading", "cartpole")
N_BARS = 200_000


@dataclass(frozen=True)
class Work:
    """How much of an update is run: epochs, and samples of each."""

    epochs: int
    samples: int

    def batches(self, size: int) -> int:
        """Gradient steps per epoch on batches of that size."""
        return max(1, self.samples // size)


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
    def least_cycles(self) -> int:
        """Rollouts that hold a fair share of episode starts: an even number, over about four trading episodes."""
        return 2 * ceil(SPAN / self.n_steps / 2) if self.n_steps < SPAN else 1

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

    def peer_work(self) -> Work:
        """What a peer really runs of an update."""
        if self.rollout < LONG_ROLLOUT:
            return Work(N_EPOCHS, self.rollout)
        return Work(1, LONG_ROLLOUT)

    def uncounted(self, work: Work) -> float:
        """What is left out of an update, in units of what was run."""
        return N_EPOCHS * self.rollout / (work.epochs * work.samples) - 1.0


def make_env(case: Case) -> Any:
    """The very same environment for every learner, behind SB3's VecEnv."""
    if case.env == "trading":
        from tailguard.env import oracle_env
        from tailguard.market.oracles import oracle_market

        return oracle_env(oracle_market("regime"), n_envs=case.n_envs, seed=0, n_bars=N_BARS)
    from tests.environments import cartpole

    return cartpole(case.n_envs, seed=0)
