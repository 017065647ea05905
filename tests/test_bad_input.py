"""Bad input: each a clear error that says what, why and what to do."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from tailguard import DistributionalPPO, PPOConfig
from tailguard.errors import ConfigError, EnvContractError
from tests.agents import tiny_agent
from tests.environments import ConstantReward, cartpole


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gama": 0.9}, 'Did you mean "gamma"'),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"gamma": 1.5}, "gamma"),
        ({"gae_lambda": -0.1}, "gae_lambda"),
        ({"n_steps": 1}, r"n_steps=1 gives rollouts of a single step.*Use n_steps >= 2"),
        ({"n_steps": 0}, "n_steps"),
        ({"batch_size": 10**6}, r"batch_size=1000000 is more than the 128 samples.*Lower batch_size or raise n_steps"),
        ({"critic": {"n_quantile": 5}}, 'Did you mean "n_quantiles"'),
        ({"critic": {"n_quantiles": 0}}, "n_quantiles"),
        ({"critic": {"kind": "categorical", "value_clip": 0.1}}, "categorical critic has none to move"),
        ({"use_sde": True}, "state-dependent exploration"),
        ({"optimizer": "sgd"}, "optimizer"),
        ({"policy_kwargs": {"lstm_hiden_size": 8}}, 'Did you mean "lstm_hidden_size"'),
        ({"policy_kwargs": {"shared_lstm": True}}, "shared_lstm"),
        ({"policy_kwargs": {"activation_fn": "sigmoidal"}}, "activation_fn"),
        ({"policy_kwargs": {"optimizer_class": dict}}, "use optimizer="),
        ({"policy_kwargs": {"action_bounds": "wrap"}}, "action_bounds"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_setting_that_cannot_be_meant_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_agent(**settings)


def test_batch_sizes_that_are_not_whole_sequences_are_rounded_with_a_notice() -> None:
    with pytest.warns(UserWarning, match=r"batch_size=60 is not a whole number of sequences of 8 steps; 64 is used"):
        agent = tiny_agent(batch_size=60)
    assert agent.learner.batch_sequences == 8


def test_a_rollout_that_is_not_whole_sequences_is_padded_and_learned_from() -> None:
    agent = tiny_agent(n_steps=29)
    agent.learn(2 * 29 * 4)
    assert agent.num_timesteps == 232


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="MlpLstmPolicy"):
        DistributionalPPO("MlpLstmPolcy", cartpole(1, 0))


class Odd(gym.Env[Any, Any]):
    """An environment of arbitrary spaces."""

    def __init__(self, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 0.0, False, False, {}


BOX = spaces.Box(-1.0, 1.0, (2,))


@pytest.mark.parametrize(
    ("observation", "action", "message"),
    [
        (spaces.Discrete(3), spaces.Discrete(2), "observations must be a Box"),
        (spaces.Dict({"a": BOX}), spaces.Discrete(2), "observations must be a Box"),
        (BOX, spaces.Text(4), "Supported: Box, Discrete"),
        (BOX, spaces.Tuple([BOX, BOX]), "Supported: Box, Discrete"),
    ],
)
def test_spaces_that_are_not_supported_are_named(observation: Any, action: Any, message: str) -> None:
    with pytest.raises(EnvContractError, match=message):
        DistributionalPPO("MlpLstmPolicy", DummyVecEnv([lambda: Odd(observation, action)]))


def test_two_return_scales_are_refused_at_construction() -> None:
    with pytest.raises(ConfigError, match="norm_reward=False"):
        tiny_agent(VecNormalize(cartpole(4, 0), norm_reward=True))


def test_an_agent_without_environment_cannot_learn() -> None:
    agent = tiny_agent()
    agent.env = None
    with pytest.raises(ConfigError, match="set_env"):
        agent.learn(10)


def test_saving_into_a_stream_is_refused() -> None:
    import io

    with pytest.raises(ConfigError, match="directory"):
        tiny_agent().save(io.BytesIO())


def test_configs_are_frozen_and_complete() -> None:
    config = PPOConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.gamma = 0.5  # type: ignore[misc]
    assert PPOConfig(**config.model_dump()) == config


def test_observations_of_another_shape_are_refused_at_prediction() -> None:
    agent = tiny_agent(DummyVecEnv([lambda: ConstantReward()]), batch_size=16)
    with pytest.raises(EnvContractError, match=r"\(7,\)"):
        agent.predict(np.zeros(7, np.float32))
