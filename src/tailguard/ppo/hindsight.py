"""Advantages without the luck of the world: a regression on its own moves (docs/algorithm.md, "Hindsight")."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from tailguard.errors import EnvContractError
from tailguard.health import metrics
from tailguard.health.metrics import Metric
from tailguard.rollout import RolloutBuffer
from tailguard.rollout.buffer import Floats
from tailguard.rollout.hindsight import hindsight_baseline

FARTHEST = 4.0
"""Where a risk period stands enters the regression cut at this many spreads: squares of outliers fit nothing else."""


class Hindsight:
    """None: advantages stay as they are."""

    def record(self, env: VecEnv) -> None:
        """After every step: what the world did in it."""

    def apply(self, buffer: RolloutBuffer, advantages: Floats) -> tuple[Floats, Mapping[Metric, float]]:
        """(T, N) advantages without the world's own moves, and figures."""
        return advantages, {}


class WorldHindsight(Hindsight):
    """Reads `env.exogenous` (N, E): moves that no action of the agent changes, such as those of prices."""

    def __init__(self) -> None:
        self.moves: list[Floats] = []

    def record(self, env: VecEnv) -> None:
        moves: Any = getattr(env, "exogenous", None)
        if moves is None:
            raise EnvContractError(
                "hindsight=True needs an environment that says what the world did in the last step: an attribute "
                "`exogenous` of shape (n_envs, E), independent of the action. TradingVecEnv has it; else switch it off."
            )
        self.moves.append(np.array(moves, dtype=np.float64))

    def apply(self, buffer: RolloutBuffer, advantages: Floats) -> tuple[Floats, Mapping[Metric, float]]:
        moves = np.stack(self.moves[-buffer.n_steps :])
        self.moves.clear()
        parts = [buffer.modes.astype(np.float64).clip(-1.0, 1.0)]
        if len(buffer.period):
            parts.append(buffer.period.clip(-FARTHEST, FARTHEST))
        valid = buffer.valid
        relieved = advantages - hindsight_baseline(advantages, np.concatenate(parts, -1), moves, valid)
        if not valid.any():
            return relieved, {}
        explained = 1.0 - float(relieved[valid].var() / max(advantages[valid].var(), 1e-300))
        return relieved, {metrics.HINDSIGHT: explained}


def make_hindsight(enabled: bool) -> Hindsight:
    return WorldHindsight() if enabled else Hindsight()
