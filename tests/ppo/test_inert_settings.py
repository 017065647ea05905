"""A setting that does nothing beside the others is refused; what earlier versions wrote with one loads with a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tailguard import DistributionalPPO
from tailguard.checkpoint import MANIFEST, read_bundle, write_bundle
from tailguard.configuration import saved_config
from tailguard.errors import ConfigError, InertSettingError
from tailguard.experiment import experiment_config, saved_experiment
from tailguard.policy import PolicyConfig
from tailguard.population import HyperparamConfig, PBTConfig
from tailguard.population.config import population_config, saved_population
from tailguard.ppo import PPOConfig
from tests.agents import tiny_agent
from tests.environments import cartpole

OF_THE_LEARNER: list[tuple[dict[str, Any], str]] = [
    ({"entropy": {"ent_coef_min": 0.1, "decay_updates": 5}, "ent_coef": 0.01}, "entropy.ent_coef_min"),
    ({"entropy": {"ent_coef_min": 0.1, "decay_updates": 5}}, "entropy.ent_coef_min"),
    ({"entropy": {"ent_coef_min": 0.001}, "ent_coef": 0.01}, "entropy.ent_coef_min"),
    ({"entropy": {"plateau_window": 3}, "ent_coef": 0.01}, "entropy.plateau_window"),
    ({"entropy": {"plateau_tolerance": 0.1, "decay_updates": 5}, "ent_coef": 0.01}, "entropy.plateau_tolerance"),
    ({"entropy": {"boost_cap": 0.5}, "ent_coef": 0.01}, "entropy.boost_cap"),
    ({"entropy": {"boost_below": -0.5}, "ent_coef": 0.01}, "entropy.boost_below"),
    ({"kl_penalty": {"beta": 2.0}}, "kl_penalty.beta"),
    ({"kl_penalty": {"factor": 3.0}}, "kl_penalty.factor"),
    ({"kl_penalty": {"target": 0.01, "beta": 200.0}}, "kl_penalty.beta"),
    ({"critic": {"value_clip_mode": "per_quantile"}}, "critic.value_clip_mode"),
    ({"critic": {"support": 4.0}}, "critic.support"),
    ({"critic": {"n_atoms": 51}}, "critic.n_atoms"),
    ({"critic": {"kind": "categorical", "huber_kappa": 0.1}}, "critic.huber_kappa"),
    ({"critic": {"tail_alpha": 0.1}}, "critic.tail_alpha"),
    ({"critic": {"grid": "tail", "n_quantiles": 1}}, "critic.grid"),
    ({"critic": {"twin": False, "aggregation": "min"}}, "critic.aggregation"),
    ({"risk": {"alpha": 0.1}}, "risk.alpha"),
    ({"risk": {"horizon": 20}}, "risk.horizon"),
    ({"risk": {"mode": "nested", "weight": 0.5, "window": 300}}, "risk.window"),
    ({"risk": {"mode": "episode", "weight": 0.5, "dual_init": 2.0}}, "risk.dual_init"),
    ({"risk": {"mode": "episode", "cvar_limit": -1.0, "dual_init": 200.0}}, "risk.dual_init"),
    ({"adversary": {"mode": "mixed", "weight": 2.0}}, "adversary.weight"),
    ({"adversary": {"mode": "mixed", "detach_std": False}}, "adversary.detach_std"),
    ({"adversary": {"mode": "regulariser", "ratio": 0.3}}, "adversary.ratio"),
    ({"return_scale": {"enabled": False, "max_change": 2.0}}, "return_scale.max_change"),
    ({"vgs": {"enabled": False, "alpha": 1.0}}, "vgs.alpha"),
    ({"sequence_length": 64, "n_steps": 16}, "sequence_length"),
]
OF_THE_POLICY: list[tuple[str, dict[str, Any], str]] = [
    ("MlpPolicy", {"lstm_hidden_size": 32}, "lstm_hidden_size"),
    ("MlpPolicy", {"n_lstm_layers": 2}, "n_lstm_layers"),
    ("MlpPolicy", {"recurrent_init": "uniform"}, "recurrent_init"),
    ("MlpPolicy", {"memory": "gru"}, "memory"),
    ("MlpLstmPolicy", {"memory": "none", "lstm_hidden_size": 32}, "lstm_hidden_size"),
    ("MlpLstmPolicy", {"net_arch": [], "activation_fn": "relu"}, "activation_fn"),
    ("MlpLstmPolicy", {"log_std_end": -2.0}, "log_std_end"),
    ("MlpLstmPolicy", {"log_std_init": -1.0}, "log_std_init"),
    ("MlpLstmPolicy", {"action_bounds": "squash"}, "action_bounds"),
]


@pytest.mark.parametrize(("settings", "path"), OF_THE_LEARNER, ids=[path for _, path in OF_THE_LEARNER])
def test_a_setting_of_the_learner_that_does_nothing_is_refused_by_its_path(settings: dict[str, Any], path: str) -> None:
    with pytest.raises(InertSettingError) as caught:
        PPOConfig(**settings)
    assert path in [setting.path for setting in caught.value.settings]
    assert str(caught.value).startswith(f"{caught.value.settings[0].path}=")
    with pytest.warns(UserWarning, match=f"{path}=.*It is taken as"):
        taken = saved_config(PPOConfig, settings, "an older bundle")
    assert PPOConfig(**taken.model_dump(mode="json")) == taken
    with pytest.raises(ConfigError, match=path):
        experiment_config({"gym_env": "CartPole-v1", "ppo": settings})


@pytest.mark.parametrize(("policy", "kwargs", "name"), OF_THE_POLICY, ids=[name for _, _, name in OF_THE_POLICY])
def test_a_setting_of_the_policy_that_does_nothing_is_refused(policy: str, kwargs: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        DistributionalPPO(policy, cartpole(2, 0), policy_kwargs=kwargs)


def test_a_default_that_is_written_out_is_not_refused() -> None:
    config = PPOConfig()
    assert PPOConfig(**config.model_dump()) == config
    assert PPOConfig(**{**config.model_dump(), "n_steps": 16}).sequence_length == 32
    kwargs = PolicyConfig().model_dump()
    DistributionalPPO("MlpPolicy", cartpole(2, 0), policy_kwargs=kwargs)
    DistributionalPPO("MlpLstmPolicy", cartpole(2, 0), risk={"mode": "episode", "weight": 0.5})


def test_one_error_names_everything_that_does_nothing() -> None:
    with pytest.raises(InertSettingError) as caught:
        PPOConfig(critic={"support": 4.0, "value_clip_mode": "per_quantile"}, risk={"alpha": 0.1, "window": 10})
    found = {setting.path for setting in caught.value.settings}
    assert found == {"critic.support", "critic.value_clip_mode", "risk.alpha", "risk.window"}


def test_a_bundle_that_was_written_with_such_settings_loads_with_a_line_for_each(tmp_path: Path) -> None:
    agent = tiny_agent().learn(128)
    agent.save(tmp_path / "agent")
    tree, manifest = read_bundle(tmp_path / "agent")
    manifest["config"]["critic"]["support"] = 4.0
    manifest["config"]["entropy"] |= {"ent_coef_min": 0.5, "decay_updates": 4}
    manifest["config"]["ent_coef"] = 0.1
    manifest["policy_config"]["log_std_end"] = -3.0
    about = {name: value for name, value in manifest.items() if name not in ("format", "schema_version", "files")}
    write_bundle(tmp_path / "old", tree, about)
    with pytest.warns(UserWarning, match="It is taken as") as lines:
        loaded = DistributionalPPO.load(tmp_path / "old")
    said = "\n".join(str(line.message) for line in lines)
    for name in ("critic.support", "entropy.ent_coef_min", "log_std_end"):
        assert f"{name}=" in said
    assert loaded.config.entropy.ent_coef_min == 0.1  # where it was cut before
    loaded.save(tmp_path / "new")
    again = DistributionalPPO.load(tmp_path / "new")
    assert again.config == loaded.config
    assert json.loads((tmp_path / "new" / MANIFEST).read_text())["policy_config"]["log_std_end"] is None


def test_the_config_of_a_run_that_was_written_with_such_settings_is_read_with_a_line(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    written = {"gym_env": "CartPole-v1", "ppo": {"critic": {"support": 4.0}}, "policy_kwargs": {"lstm_hidden_size": 8}}
    file.write_text(yaml.safe_dump({**written, "policy": "MlpPolicy"}))
    with pytest.warns(UserWarning, match="It is taken as") as lines:
        config = saved_experiment(file)
    assert any("ppo.critic.support=" in str(line.message) for line in lines)
    assert config.ppo.critic.support == 8.0
    assert config.policy_kwargs.lstm_hidden_size == 64
    with pytest.raises(ConfigError, match=r"policy_kwargs\.lstm_hidden_size"):
        experiment_config({"gym_env": "CartPole-v1", "policy": "MlpPolicy", "policy_kwargs": {"lstm_hidden_size": 8}})


# populations

POPULATION: list[tuple[dict[str, Any], str]] = [
    ({"selection": "tournament", "truncation_ratio": 0.5}, "truncation_ratio"),
    ({"score": "training", "score_steps": 10}, "score_steps"),
    ({"mode": "asynchronous", "ready_percentage": 0.5}, "ready_percentage"),
]
SETTING: list[dict[str, Any]] = [
    {"values": [1, 2], "log": True},
    {"values": [1, 2], "integer": True},
    {"values": [1, 2], "perturb_step": 1.0},
    {"low": 0.1, "high": 0.9, "perturb_step": 0.1, "perturb_factors": [0.5, 2.0]},
]


@pytest.mark.parametrize(("settings", "path"), POPULATION, ids=[path for _, path in POPULATION])
def test_a_setting_of_the_population_that_does_nothing_is_refused(settings: dict[str, Any], path: str) -> None:
    space = [{"name": "gamma", "low": 0.9, "high": 0.99}]
    with pytest.raises(ConfigError, match=path):
        PBTConfig(hyperparams=space, **settings)
    given = {"gym_env": "CartPole-v1", "population": {"hyperparams": space, **settings}}
    with pytest.raises(ConfigError, match=path):
        population_config(given)
    with pytest.warns(UserWarning, match=path):
        saved_population(given, "config.yaml")


@pytest.mark.parametrize("settings", SETTING, ids=str)
def test_a_search_space_with_a_setting_that_does_nothing_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InertSettingError):
        HyperparamConfig(name="n_epochs", **settings)
    given = {"gym_env": "CartPole-v1", "population": {"hyperparams": [{"name": "n_epochs", **settings}]}}
    if "values" in settings:
        with pytest.warns(UserWarning, match=r"hyperparams\.0\."):
            assert saved_population(given, "config.yaml").population.hyperparams[0].values == (1, 2)


def population(*space: dict[str, Any], **ppo: Any) -> Any:
    return population_config({"gym_env": "CartPole-v1", "ppo": ppo, "population": {"hyperparams": list(space)}})


def test_a_population_may_vary_what_only_some_of_its_members_read() -> None:
    ratio = {"name": "adversary.ratio", "low": 0.1, "high": 0.9}
    mode = {"name": "adversary.mode", "values": ["mixed", "regulariser"]}
    population(ratio, mode, adversary={})
    with pytest.raises(ConfigError, match=r"no member reads.*adversary\.ratio"):
        population(ratio, adversary={})


def test_bounds_that_do_not_go_together_are_refused_before_anything_trains() -> None:
    floor = {"name": "entropy.ent_coef_min", "low": 0.0, "high": 0.02}
    start = {"name": "ent_coef", "low": 0.01, "high": 0.1}
    with pytest.raises(ConfigError, match=r"entropy\.ent_coef_min=0\.02 with ent_coef=0\.01"):
        population(floor, start, ent_coef=0.05, entropy={"decay_updates": 4})
    population({**floor, "high": 0.01}, start, ent_coef=0.05, entropy={"decay_updates": 4})


def test_settings_of_earlier_versions_give_way_with_a_line_where_they_said_something_else(tmp_path: Path) -> None:
    """Bundles and run folders of before name the precision of critics and gradients."""
    plain = PPOConfig(gradient_precision="float32", critic={"precision": "float32", "n_quantiles": 8})
    assert plain == PPOConfig(critic={"n_quantiles": 8})
    with pytest.warns(UserWarning, match="gradient_precision='bfloat16' is a setting of earlier versions"):
        assert PPOConfig(gradient_precision="bfloat16") == PPOConfig()
    tiny_agent().save(tmp_path / "agent")
    tree, manifest = read_bundle(tmp_path / "agent")
    manifest["config"]["gradient_precision"], manifest["config"]["critic"]["precision"] = "float32", "bfloat16"
    write_bundle(tmp_path / "agent", tree, manifest)
    with pytest.warns(UserWarning, match="precision='bfloat16' is a setting of earlier versions"):
        DistributionalPPO.load(tmp_path / "agent")
