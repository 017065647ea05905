"""Experiments: a task's defaults, a file, named settings and overrides become one checked configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailguard.errors import ConfigError
from tailguard.experiment import Experiment, experiment_config, load_experiment
from tailguard.presets import preset


def test_a_preset_is_completed_by_its_own_settings() -> None:
    config = experiment_config({"preset": "regime"})
    assert config.ppo == preset("regime").config
    assert (config.n_envs, config.steps) == (64, 1_000_000)


def test_overrides_beat_names_beat_the_file_beats_the_preset(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("preset: regime\nseed: 1\nsteps: 5\nppo: {gamma: 0.5, critic: {n_quantiles: 8}}")
    config = load_experiment(tmp_path / "c.yaml", {"seed": 2}, ["ppo.gamma=0.7", "steps=6"])
    assert (config.seed, config.steps, config.ppo.gamma, config.ppo.critic.n_quantiles) == (2, 6, 0.7, 8)
    assert config.ppo.gae_lambda == preset("regime").config.gae_lambda


def test_a_configuration_survives_its_yaml(tmp_path: Path) -> None:
    config = experiment_config({"preset": "signal"}, ["ppo.learning_rate.start=1e-3", "ppo.optimizer=upgd"])
    (tmp_path / "c.yaml").write_text(config.to_yaml())
    assert load_experiment(tmp_path / "c.yaml") == config


@pytest.mark.parametrize(
    ("given", "overrides", "message"),
    [
        ({}, [], "Nothing says where to train"),
        ({"preset": "regime", "gym_env": "CartPole-v1"}, [], "exactly one of"),
        ({"preset": "regim"}, [], 'Did you mean "regime"'),
        ({"preset": 3}, [], "expected a name"),
        ({"gym_env": "CartPole-v9"}, [], "no registered Gymnasium"),
        ({"gym_env": "os:system"}, [], "no registered Gymnasium"),
        ({"preset": "regime"}, ["ppo.gama=0.9"], 'Did you mean "gamma"'),
        ({"preset": "regime"}, ["stepz=9"], 'Did you mean "steps"'),
        ({"preset": "regime"}, ["ppo.critic.n_quantile=9"], 'Did you mean "n_quantiles"'),
        ({"preset": "regime"}, ["checkpoint.keep=9"], "keep_last"),
        ({"preset": "regime"}, ["gamma"], "key.path=value"),
        ({"preset": "regime"}, ["=3"], "key.path=value"),
        ({"preset": "regime"}, ["seed.x=3"], "seed"),
        ({"preset": "regime"}, ["ppo.gamma=high"], "gamma"),
        ({"preset": "regime"}, ["ppo=[1]"], "ppo"),
        ({"preset": "regime", "steps": 0}, [], "steps"),
    ],
    ids=str,
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment_config(given, overrides)


def test_an_experiment_builds_the_agent_its_preset_builds() -> None:
    config = experiment_config({"preset": "regime", "seed": 3})
    ours, theirs = Experiment(config).agent(), preset("regime").agent(seed=3)
    assert ours.config == theirs.config
    assert all(a.equal(b) for a, b in zip(ours.policy.parameters(), theirs.policy.parameters(), strict=True))


def test_a_gymnasium_environment_is_a_task_of_its_own() -> None:
    agent = Experiment(experiment_config({"gym_env": "CartPole-v1", "n_envs": 2}, ["ppo.n_steps=16"])).agent()
    assert agent.n_envs == 2
