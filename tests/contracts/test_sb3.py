"""A program written for sb3_contrib.RecurrentPPO runs with the import changed."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import CallbackList, CheckpointCallback, EvalCallback, EveryNTimesteps
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

from tailguard import DistributionalPPO, PPOConfig
from tests.agents import TINY, TINY_POLICY, collected, tiny_agent
from tests.environments import Identity, cartpole, vectorized

SPACES = [
    spaces.Box(-2.0, 2.0, (2,)),
    spaces.Discrete(3),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiBinary(2),
]


@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpPolicy"])
@pytest.mark.parametrize("space", SPACES, ids=lambda s: type(s).__name__)
def test_every_action_space_learns_predicts_saves_and_loads(space: spaces.Space, policy: str, tmp_path: Path) -> None:
    env = vectorized(lambda: Identity(space), 4)
    agent = tiny_agent(env, policy)
    agent.learn(256)
    observation = env.reset()
    action, state = agent.predict(observation, deterministic=True)
    assert all(space.contains(a) for a in action)
    agent.save(tmp_path / "agent")
    twin = DistributionalPPO.load(tmp_path / "agent", env=env)
    again, state_again = twin.predict(observation, deterministic=True)
    np.testing.assert_array_equal(action, again)
    assert state is not None
    assert state_again is not None
    np.testing.assert_array_equal(state[0], state_again[0])


def test_the_documented_recurrent_loop_of_sb3_runs() -> None:
    """The example of sb3-contrib's documentation, line for line but for the import."""
    model = DistributionalPPO("MlpLstmPolicy", "CartPole-v1", verbose=0, **TINY | {"batch_size": 16})
    model.learn(64)
    vec_env = model.get_env()
    assert vec_env is not None
    assert evaluate_policy(model, vec_env, n_eval_episodes=2, warn=False)[0] > 0
    obs = vec_env.reset()
    lstm_states = None
    episode_starts = np.ones((vec_env.num_envs,), dtype=bool)
    for _ in range(30):
        action, lstm_states = model.predict(obs, state=lstm_states, episode_start=episode_starts, deterministic=True)
        obs, _, episode_starts, _ = vec_env.step(action)


def test_the_keywords_of_recurrent_ppo_are_taken() -> None:
    model = DistributionalPPO(
        "MlpLstmPolicy",
        cartpole(2, 0),
        learning_rate=3e-4,
        n_steps=32,
        batch_size=32,
        n_epochs=2,
        gamma=0.98,
        gae_lambda=0.9,
        clip_range=0.1,
        clip_range_vf=None,
        normalize_advantage=True,
        ent_coef=0.01,
        vf_coef=0.4,
        max_grad_norm=0.7,
        use_sde=False,
        sde_sample_freq=-1,
        target_kl=None,
        stats_window_size=50,
        tensorboard_log=None,
        policy_kwargs={
            "lstm_hidden_size": 16,
            "n_lstm_layers": 1,
            "shared_lstm": False,
            "enable_critic_lstm": True,
            "net_arch": {"pi": [8], "vf": [8]},
            "activation_fn": torch.nn.ReLU,
            "ortho_init": False,
        },
        verbose=0,
        seed=1,
        device="cpu",
    )
    model.learn(64)
    assert (model.n_steps, model.gamma, model.gae_lambda) == (32, 0.98, 0.9)
    assert model.policy.config.activation_fn == "relu"


def test_a_whole_config_and_keywords_on_top_of_it() -> None:
    config = PPOConfig(n_steps=16, gamma=0.9, critic={"n_quantiles": 8, "kind": "categorical"})
    model = DistributionalPPO("MlpPolicy", cartpole(2, 0), config=config, gamma=0.8, critic={"n_quantiles": 4})
    assert (model.config.n_steps, model.config.gamma) == (16, 0.8)
    assert (model.config.critic.n_quantiles, model.config.critic.kind) == (4, "categorical")


def test_schedules_of_sb3_are_functions_of_the_progress_remaining() -> None:
    agent = tiny_agent(learning_rate=lambda remaining: 1e-3 * remaining, clip_range=lambda remaining: 0.1 + remaining)
    agent.learn(4 * 128)
    assert agent.learner.optimizer.param_groups[0]["lr"] == pytest.approx(0.0)
    assert agent.logger.name_to_value["train/clip_range"] == pytest.approx(0.1)


def test_a_schedule_can_be_given_as_a_dict() -> None:
    agent = tiny_agent(learning_rate={"start": 1e-3, "end": 0.0, "shape": "cosine"})
    agent.learn(2 * 128)
    assert agent.learner.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)
    assert agent.lr_schedule(0.5) == pytest.approx(5e-4)


def test_callbacks_evaluate_checkpoint_and_stop(tmp_path: Path) -> None:
    agent = tiny_agent()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Training and eval env are not of the same type")
        evaluation = EvalCallback(cartpole(1, 5), best_model_save_path=str(tmp_path / "best"), eval_freq=32, verbose=0)
        checkpoints = CheckpointCallback(save_freq=32, save_path=str(tmp_path / "checkpoints"))
        seen: list[int] = []

        class Note(EveryNTimesteps):
            def _on_event(self) -> bool:
                seen.append(self.num_timesteps)
                return len(seen) < 3

        agent.learn(1000, callback=CallbackList([evaluation, checkpoints, Note(128, None)]))  # type: ignore[arg-type]
    assert len(seen) == 3
    assert agent.num_timesteps < 1000
    best = DistributionalPPO.load(tmp_path / "best" / "best_model")
    best.predict(np.zeros((1, 2), np.float32))
    assert len(list((tmp_path / "checkpoints").iterdir())) >= 2


def test_vec_envs_of_sb3_train_the_same_agent() -> None:
    weights = []
    for kind in (SubprocVecEnv, DummyVecEnv):
        env = kind([make_monitored] * 2)
        try:
            weights.append(tiny_agent(env, batch_size=32).learn(128).learner.vector.flat.detach())
        finally:
            env.close()
    assert torch.equal(*weights)


def make_monitored() -> gym.Env[Any, Any]:
    return Monitor(gym.make("CartPole-v1"))


def test_frame_stacking_and_normalization_wrap_as_usual() -> None:
    env = VecNormalize(VecFrameStack(cartpole(2, 0), 3), norm_reward=False)
    agent = tiny_agent(env, batch_size=32)
    agent.learn(128)
    assert agent.get_vec_normalize_env() is env
    assert evaluate_policy(agent, env, n_eval_episodes=1, warn=False)[0] > 0


def test_tensorboard_csv_and_json_loggers_receive_the_figures(tmp_path: Path) -> None:
    agent = tiny_agent()
    agent.set_logger(configure(str(tmp_path), ["csv", "json", "tensorboard"]))
    agent.learn(3 * 128)
    agent.logger.close()
    header = (tmp_path / "progress.csv").read_text().splitlines()[0]
    for name in ("rollout/ep_rew_mean", "train/value_loss", "train/explained_variance", "time/fps", "train/approx_kl"):
        assert name in header
    assert list(tmp_path.glob("events.out.tfevents*"))


def test_a_progress_bar_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "rich is experimental")
        tiny_agent().learn(256, progress_bar=True)
    assert "256/256" in "".join(capsys.readouterr())


def test_learning_goes_on_without_resetting_the_counter() -> None:
    agent = tiny_agent()
    agent.learn(128)
    observation = agent._last_obs
    agent.learn(128, reset_num_timesteps=False)
    assert agent.num_timesteps == 256
    assert observation is not None
    agent.learn(128)
    assert agent.num_timesteps == 128


def test_the_same_seed_gives_the_same_agent_and_another_seed_another() -> None:
    def weights(seed: int) -> torch.Tensor:
        return tiny_agent(cartpole(4, seed), seed=seed).learn(256).learner.vector.flat.detach()

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_parameters_are_exchanged_as_in_sb3_with_controllers() -> None:
    one, two = tiny_agent(kl_penalty={"target": 0.01}), tiny_agent(seed=5, kl_penalty={"target": 0.01})
    one.learn(256)
    parameters = one.get_parameters()
    assert {"policy", "policy.optimizer", "kl_penalty"} <= set(parameters)
    assert set(one.get_parameters(include_optimizer=False)) == {"policy", "return_scale", "risk", "obs_stats"}
    two.set_parameters(parameters)
    assert torch.equal(one.learner.vector.flat, two.learner.vector.flat)
    assert two.kl_penalty.beta == one.kl_penalty.beta
    with pytest.raises(ValueError, match="missing"):
        two.set_parameters({"policy": parameters["policy"]})
    with pytest.warns(UserWarning, match="no return_scale"):
        two.set_parameters({"policy": parameters["policy"]}, exact_match=False)


def test_predict_takes_single_and_batched_observations() -> None:
    agent = tiny_agent()
    single, _ = agent.predict(np.zeros(2, np.float32), deterministic=True)
    batch, state = agent.predict(np.zeros((3, 2), np.float32), deterministic=True)
    assert np.shape(single) == ()
    assert batch.shape == (3,)
    assert state is not None
    reset, _ = agent.predict(np.zeros((3, 2), np.float32), state, np.ones(3, bool), deterministic=True)
    np.testing.assert_array_equal(batch, reset)
    with pytest.raises(ValueError, match="shape"):
        agent.predict(np.zeros((3, 5), np.float32))
    with pytest.raises(ValueError, match="expected"):
        agent.predict(np.zeros((2, 2), np.float32), state)


def test_predicted_quantiles_are_raw_sorted_and_remember() -> None:
    agent = tiny_agent()
    agent.learn(512)
    observation = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    quantiles = agent.predict_quantiles(observation)
    assert quantiles.shape == (5, 8)
    assert (np.diff(quantiles, axis=-1) >= 0).all()
    _, state = agent.predict(observation)
    assert not np.array_equal(agent.predict_quantiles(observation, state), quantiles)
    np.testing.assert_allclose(agent.predict_quantiles(observation, state, np.ones(5, bool)), quantiles)


def test_the_memory_that_predict_hands_out_leads_the_critics_where_acting_led_them() -> None:
    agent = collected(tiny_agent().learn(512))
    buffer, state = agent.rollout_buffer, None
    assert buffer.starts[0].all()
    assert buffer.starts[1:].any()
    for observations, starts, laws in zip(
        buffer.observations, buffer.starts, buffer.quantiles.swapaxes(0, 1), strict=True
    ):
        law = agent.predict_quantiles(observations, state, starts)
        np.testing.assert_allclose(law, np.sort(laws.mean(0), -1), rtol=1e-4, atol=1e-4)
        _, state = agent.predict(observations, state, starts)


def test_policy_kwargs_reach_the_network() -> None:
    agent = tiny_agent(policy_kwargs={**TINY_POLICY, "memory": "gru", "lstm_hidden_size": 12, "n_lstm_layers": 2})
    agent.learn(128)
    assert agent.policy.initial_state(3).hidden.shape == (2, 3, 12)
