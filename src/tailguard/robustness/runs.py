"""Attacking a run: its newest agent, in episodes it has not learned from, and where the result goes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from stable_baselines3.common.vec_env import VecEnv

from tailguard.config_edits import trained_experiment
from tailguard.env.dataset import Dataset
from tailguard.errors import ConfigError
from tailguard.evaluation.attack_record import FILE, AttackRecord
from tailguard.experiment import DataTask, Experiment, PresetTask, saved_experiment
from tailguard.market.features import FeatureSet
from tailguard.ppo import DistributionalPPO
from tailguard.robustness.attacks import ATTACKS
from tailguard.robustness.bench import AttackConfig, Load, Row, Say, attack_agent, write_record
from tailguard.robustness.prices import Features
from tailguard.robustness.progress import FILE as PROGRESS_FILE
from tailguard.robustness.progress import KeptEpisodes, agent_digest
from tailguard.run import RunFolder, newest_checkpoint

MOST_ENVS = 32


def default_attacks(experiment: Experiment) -> tuple[str, ...]:
    """Every attack that needs no training of its own."""
    has_prices = features_of(experiment) is not None
    return tuple(
        name for name, attack in ATTACKS.items() if not attack.learned and (has_prices or not attack.of_prices)
    )


def attack_run(
    folder: RunFolder,
    config: AttackConfig,
    say: Say = lambda text: None,
    row: Row = lambda name, unit, point: None,
) -> AttackRecord:
    """Attack the newest agent of a run and write the record into its folder; what an earlier call did is kept."""
    folder.require_single_agent()
    experiment = trained_experiment(folder, newest_checkpoint(folder))
    features = features_of(experiment)
    if features is None and any(ATTACKS[name].of_prices for name in config.attacks if name in ATTACKS):
        raise ConfigError(
            f"The run trained on {experiment.task.name!r}, which has no bars, so nobody can move its prices. Leave out "
            "the attacks whose names begin with price."
        )
    kept = KeptEpisodes(folder.path / PROGRESS_FILE, agent_digest(newest_checkpoint(folder)))
    record = attack_agent(loader(folder, experiment, config.episodes), config, features, say, row, kept)
    write_record(record, record_file(folder))
    return record


def experiment_of(folder: RunFolder) -> Experiment:
    """What a run's folder describes."""
    folder.require_single_agent()
    return Experiment(saved_experiment(folder.config_file))


def record_file(folder: RunFolder) -> Path:
    return folder.path / FILE


def loader(folder: RunFolder, experiment: Experiment, n_episodes: int) -> Load:
    """From a seed to the agent in episodes of that seed; they are validation's, or test's where there is none."""
    checkpoint = newest_checkpoint(folder)

    @cache
    def load(seed: int) -> DistributionalPPO:
        return DistributionalPPO.load(checkpoint, env=unseen_env(experiment, min(n_episodes, MOST_ENVS), seed))

    return load


def unseen_env(experiment: Experiment, n_envs: int, seed: int) -> VecEnv:
    """Episodes the agent has not learned from."""
    task = experiment.task
    if isinstance(task, DataTask) and not task.config.validation:
        return task.dataset.test_env(n_envs, seed)
    return task.validation_env(n_envs, experiment.config.seed + seed)


def features_of(experiment: Experiment) -> Features | None:
    """From bars to what the agent is shown of them; None where it trades no bars."""
    task = experiment.task
    if isinstance(task, PresetTask):
        return task.preset.market.features
    return scaled_features(task.dataset) if isinstance(task, DataTask) else None


def scaled_features(data: Dataset) -> Features:
    """With the scaler of the training."""
    plain = FeatureSet(data.config.features)
    return lambda bars: data.scaler(plain(bars))
