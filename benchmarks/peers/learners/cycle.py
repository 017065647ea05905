"""What the loops written for the comparison share: the settings of PPO, and collecting and training in turn."""

from __future__ import annotations

from benchmarks.peers.cases import Case

GAMMA, LAMBDA, CLIP, VF_COEF, MAX_NORM, RATE = 0.99, 0.95, 0.2, 0.5, 0.5, 3e-4


class Cycle:
    """Whole rollouts, each followed by its update."""

    case: Case

    def collect_rollouts(self) -> None:
        raise NotImplementedError

    def train(self) -> None:
        raise NotImplementedError

    def learn(self, steps: int, reset_num_timesteps: bool = False) -> None:
        for _ in range(steps // self.case.rollout):
            self.collect_rollouts()
            self.train()
