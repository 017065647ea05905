"""Tiny real runs for tests: a market that saves itself, and a foreign environment that cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stable_baselines3.common.vec_env import VecEnv

from tailguard.checkpoint import read_bundle, state_digest
from tailguard.env import oracle_env
from tailguard.experiment import Experiment, PresetTask, experiment_config
from tailguard.run import Listener, Outcome, RunFolder, resumed, train
from tests.agents import TINY, TINY_POLICY

STEPS_PER_UPDATE = 4 * 32
SOURCES: dict[str, dict[str, Any]] = {
    "regime": {"preset": "regime"},
    "cartpole": {"gym_env": "CartPole-v1"},
}
"""A market that saves itself, and a foreign environment that cannot."""


class TinyExperiment(Experiment):
    """Presets draw a million bars; a test needs fewer."""

    def training_env(self) -> VecEnv:
        if isinstance(self.task, PresetTask):
            return oracle_env(self.task.preset.market, self.config.n_envs, self.config.seed, n_bars=20_000)
        return super().training_env()


def tiny_experiment(source: str, updates: int = 6, **settings: Any) -> Experiment:
    """An experiment whose updates take milliseconds."""
    ppo = {**TINY, **settings.pop("ppo", {})}
    checkpoint = {"every_updates": 2, **settings.pop("checkpoint", {})}
    given = {"n_envs": 4, "steps": updates * STEPS_PER_UPDATE, "policy_kwargs": TINY_POLICY, **settings}
    where = SOURCES.get(source, {"data": {"files": [source]}})  # anything else is a file of bars
    return TinyExperiment(experiment_config({**where, **given, "ppo": ppo, "checkpoint": checkpoint}))


def begin(folder: RunFolder, experiment: Experiment, listener: Listener | None = None) -> Outcome:
    """Train from the start."""
    with folder.lock():
        env = experiment.training_env()
        folder.create(experiment.config.to_yaml(), experiment.manifest(env, ["test"]))
        return run_on(folder, experiment, experiment.agent(env), listener)


def go_on(folder: RunFolder, experiment: Experiment, listener: Listener | None = None) -> Outcome:
    """Train on from the last good checkpoint."""
    with folder.lock():
        agent = resumed(folder, experiment.training_env, experiment.agent, experiment.config.checkpoint)
        return run_on(folder, experiment, agent, listener)


def run_on(folder: RunFolder, experiment: Experiment, agent: Any, listener: Listener | None) -> Outcome:
    return train(agent, folder, experiment.config.steps, experiment.config.checkpoint, listener)


def whole_state(bundle: Path) -> str:
    """One sha256 over everything a bundle holds."""
    return state_digest(read_bundle(bundle)[0])
