"""Training inside a run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stable_baselines3.common.type_aliases import MaybeCallback

from tailguard.ppo import DistributionalPPO
from tailguard.run.folder import RunFolder
from tailguard.run.settings import CheckpointConfig


@dataclass(frozen=True)
class Outcome:
    """Where training stands when `train` returns."""

    step: int
    finished: bool
    checkpoint: Path


def train(
    agent: DistributionalPPO,
    folder: RunFolder,
    total_steps: int,
    settings: CheckpointConfig,
    callback: MaybeCallback = None,
) -> Outcome:
    """Train up to `total_steps` environment steps and write a checkpoint at the end."""
    agent.learn(total_steps, callback)
    place = folder.checkpoint(agent.num_timesteps)
    agent.save(place)
    return Outcome(agent.num_timesteps, True, place)
