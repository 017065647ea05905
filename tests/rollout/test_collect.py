"""A1, A4, A6, B1-B3, C1-C3 on real agents: what a rollout holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnvWrapper, VecNormalize

from tailguard.errors import EnvContractError, NonFiniteError
from tailguard.policy import Layout, State
from tailguard.rollout.buffer import all_finite
from tests.agents import collected, logged, tiny_agent
from tests.environments import ConstantReward, cartpole, vectorized


def replay_critics(agent: Any, buffer: Any) -> tuple[np.ndarray, dict[tuple[int, int], np.ndarray]]:
    """Every critic step by step over the rollout: quantiles (C, T, N, Q) and those of truncated ends, raw units."""
    scale, laws, ends = agent.return_scale.snapshot, [], {}
    with torch.no_grad():
        for critic in agent.policy.critics:
            state = critic.trunk.memory.initial_state(buffer.n_envs)
            steps = []
            for t in range(buffer.n_steps):
                state = state.keep(torch.from_numpy(~buffer.starts[t]).float())
                judged, state = critic.step(torch.from_numpy(buffer.observations[t]), state)
                steps.append(judged.quantiles)
                for n in np.flatnonzero(buffer.truncated[t]):
                    last = torch.from_numpy(buffer.terminal_observations[t, int(n)])[None]
                    ends.setdefault((t, int(n)), []).append(critic.step(last, state.select([int(n)]))[0].quantiles[0])
            laws.append(torch.stack(steps))
    decode = lambda z: scale.mean + scale.std * z.numpy()  # noqa: E731
    return decode(torch.stack(laws)), {key: decode(torch.stack(parts).mean(0)) for key, parts in ends.items()}


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ([0.0, -1.0, 2.0], True),
        ([3e38, 3e38, -3e38], True),
        ([1.0, np.nan, 0.0], False),
        ([np.inf, -np.inf, 0.0], False),
        ([], True),
    ],
    ids=str,
)
def test_finite_means_every_number_and_not_their_sum(values: list[float], finite: bool, kind: Any) -> None:
    assert all_finite(np.array([values], kind)) is finite


def test_whole_numbers_are_finite() -> None:
    assert all_finite(np.array([2**62, -(2**62)]))
    assert all_finite(np.array([[255, 0]], np.uint8))


def test_the_critics_fused_judgement_equals_them_step_by_step_with_truncated_ends() -> None:
    agent = collected(tiny_agent(vectorized(lambda: ConstantReward(limit=11), 3)))
    buffer = agent.rollout_buffer
    assert buffer.truncated.sum() == 6  # three environments, two ends each in 32 steps
    expected, ends = replay_critics(agent, buffer)
    np.testing.assert_allclose(buffer.quantiles, expected, rtol=1e-5, atol=1e-5)
    assert set(buffer.terminal_law) == set(ends)
    for where, law in ends.items():
        np.testing.assert_allclose(buffer.terminal_law[where], law, rtol=1e-5, atol=1e-5)
        assert buffer.terminal_values[where] == pytest.approx(law.mean(), rel=1e-5)


def test_values_are_the_aggregated_mean_in_raw_units() -> None:
    agent = collected(tiny_agent())
    buffer = agent.rollout_buffer
    np.testing.assert_allclose(buffer.values[:-1], buffer.quantiles.mean(0).mean(-1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(buffer.returns, buffer.advantages + buffer.values[:-1])


def test_min_aggregation_takes_the_law_of_lower_mean_everywhere() -> None:
    agent = collected(tiny_agent(critic={"aggregation": "min"}))
    buffer = agent.rollout_buffer
    np.testing.assert_allclose(buffer.values[:-1], buffer.quantiles.mean(-1).min(0), rtol=1e-5, atol=1e-5)


def test_stored_states_are_those_before_the_step_so_the_first_log_ratio_is_zero() -> None:
    agent = tiny_agent()
    agent.learn(4 * 32 * 4)
    assert logged(agent)["train/first_log_ratio_max_abs"] <= 1e-5


def test_states_stored_after_the_step_would_be_noticed() -> None:
    agent = tiny_agent(learning_rate=1e-2)
    agent.learn(4 * 32 * 3)
    agent.policy.actor.layers[0].weight.data.mul_(3.0)  # a policy that listens to its memory
    collected(agent)
    buffer = agent.rollout_buffer
    shifted = [State(s.hidden.roll(1, 1), s.cell.roll(1, 1)) for s in buffer.actor_states]
    buffer.actor_states = shifted
    agent.train()
    assert logged(agent)["train/first_log_ratio_max_abs"] > 1e-3
    assert logged(agent)["warn/first_log_ratio"] == 1.0


def test_finished_environments_restart_their_memory_and_others_go_on() -> None:
    agent = tiny_agent(cartpole(4, 0))
    collected(agent)
    buffer = agent.rollout_buffer
    state = agent.policy.initial_state(4)
    with torch.no_grad():
        for t in range(32):
            state = state.keep(torch.from_numpy(~buffer.starts[t]).float())
            if t % 8 == 0:
                stored = buffer.actor_states[t // 8]
                np.testing.assert_allclose(stored.hidden, state.hidden, atol=1e-6)
                np.testing.assert_allclose(stored.cell, state.cell, atol=1e-6)
            _, state = agent.policy.actor.memory.step(torch.from_numpy(buffer.observations[t]), state)
    assert buffer.starts[1:].any()


def test_every_sequence_replayed_from_its_stored_state_gives_the_acting_log_probs() -> None:
    agent = collected(tiny_agent())
    buffer, policy = agent.rollout_buffer, agent.policy
    for s in range(4):
        rows = slice(8 * s, 8 * s + 8)
        with torch.no_grad():
            parameters = policy.action_parameters(
                torch.from_numpy(buffer.observations[rows]), Layout(buffer.starts[rows]), buffer.actor_states[s]
            )
            log_probs = policy.action_head.log_prob(parameters, torch.from_numpy(buffer.actions[rows]))
        np.testing.assert_allclose(log_probs, buffer.log_probs[rows], atol=1e-5)


class Broken(VecEnvWrapper):
    """A VecEnv whose step is spoiled from the third step on."""

    def __init__(self, venv: Any, spoil: Any) -> None:
        super().__init__(venv)
        self.spoil, self.count = spoil, 0

    def reset(self) -> Any:
        return self.venv.reset()

    def step_wait(self) -> Any:
        self.count += 1
        step = self.venv.step_wait()
        return self.spoil(*step) if self.count == 3 else step


def spoil_reward(value: float) -> Any:
    def spoil(obs: Any, rewards: Any, dones: Any, infos: Any) -> Any:
        rewards[1] = value
        return obs, rewards, dones, infos

    return spoil


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_names_environment_and_step(value: float) -> None:
    with pytest.raises(NonFiniteError, match=r"reward is (nan|inf) at step 2 of the rollout in environment 1"):
        tiny_agent(Broken(cartpole(4, 0), spoil_reward(value))).learn(128)


def test_an_observation_that_is_not_finite_names_environment_step_and_feature() -> None:
    def spoil(obs: Any, rewards: Any, dones: Any, infos: Any) -> Any:
        obs[2, 1] = np.nan
        return obs, rewards, dones, infos

    with pytest.raises(EnvContractError, match=r"nan at step 2 of the rollout in environment 2, feature 1"):
        tiny_agent(Broken(cartpole(4, 0), spoil)).learn(128)


def test_a_bad_observation_does_not_poison_the_normalizer() -> None:
    def spoil(obs: Any, rewards: Any, dones: Any, infos: Any) -> Any:
        obs[2, 1] = np.inf
        return obs, rewards, dones, infos

    env = VecNormalize(Broken(cartpole(4, 0), spoil), norm_reward=False)
    with pytest.raises(EnvContractError, match="inf at step 2"):
        tiny_agent(env).learn(128)
    assert np.isfinite(env.obs_rms.mean).all()
    assert np.isfinite(env.obs_rms.var).all()


@pytest.mark.parametrize(
    ("dones", "found"),
    [(np.zeros((4, 1), bool), r"\(4, 1\)"), (np.zeros(4), "float64"), (np.zeros(3, bool), r"\(3,\)")],
)
def test_dones_of_a_wrong_shape_or_type_are_refused_before_any_state_changes(dones: Any, found: str) -> None:
    agent = tiny_agent(Broken(cartpole(4, 0), lambda obs, rewards, _, infos: (obs, rewards, dones, infos)))
    with pytest.raises(EnvContractError, match=found):
        agent.learn(128)
    assert agent.rollout_buffer.position == 2
    assert agent.live is not None
    assert agent.live.starts.shape == (4,)


def test_a_truncation_without_terminal_observation_is_refused() -> None:
    def spoil(obs: Any, rewards: Any, dones: Any, infos: Any) -> Any:
        dones = dones.copy()
        dones[0] = True
        infos[0] = {"TimeLimit.truncated": True}
        return obs, rewards, dones, infos

    with pytest.raises(EnvContractError, match="terminal_observation"):
        tiny_agent(Broken(cartpole(4, 0), spoil)).learn(128)


@pytest.mark.parametrize("part", ["values", "terminal_values", "rewards"])
def test_a_value_that_is_not_finite_is_named(part: str) -> None:
    from tailguard.rollout.collect import estimate_advantages

    buffer = collected(tiny_agent()).rollout_buffer
    getattr(buffer, part)[5, 2] = np.inf
    with pytest.raises(NonFiniteError, match=r"is inf at step 5 of the rollout in environment 2|advantage is inf"):
        estimate_advantages(buffer, 0.99, 0.95)


def test_observation_statistics_stand_still_during_a_rollout_and_move_after_it() -> None:
    env = VecNormalize(cartpole(4, 0), norm_reward=False)
    agent = tiny_agent(env)
    means = []

    class Watch(BaseCallback):
        def _on_step(self) -> bool:
            means.append(env.obs_rms.mean.copy())
            return True

    agent.learn(3 * 128, callback=Watch())
    for rollout in range(3):
        inside = means[32 * rollout : 32 * rollout + 32]
        assert all(np.array_equal(inside[0], other) for other in inside)
    assert not np.array_equal(means[0], means[32])
    assert not np.array_equal(means[32], means[64])
    assert env.training  # handed back as it was found


def test_drift_of_the_statistics_is_logged_in_units_of_the_old_std() -> None:
    env = VecNormalize(cartpole(4, 0), norm_reward=False)
    agent = tiny_agent(env)
    collected(agent)
    before_mean, before_std = np.zeros(2), np.sqrt(1.0 + env.epsilon)
    agent.train()
    assert logged(agent)["debug/vecnormalize_mean_drift"] == pytest.approx(
        np.abs((env.obs_rms.mean - before_mean) / before_std).max(), rel=1e-6
    )
    assert logged(agent)["debug/vecnormalize_std_drift"] == pytest.approx(
        np.abs(np.sqrt(env.obs_rms.var + env.epsilon) / before_std - 1.0).max(), rel=1e-6
    )


def test_the_waiting_observation_is_seen_through_the_new_statistics() -> None:
    env = VecNormalize(cartpole(4, 0), norm_reward=False)
    agent = collected(tiny_agent(env))
    assert agent.live is not None
    np.testing.assert_allclose(agent.live.observations, env.normalize_obs(env.get_original_obs()))


def test_statistics_the_user_froze_stay_frozen() -> None:
    env = VecNormalize(cartpole(4, 0), norm_reward=False, training=False)
    tiny_agent(env).learn(128)
    assert (env.obs_rms.mean == 0).all()


def test_one_environment_is_enough() -> None:
    agent = tiny_agent(DummyVecEnv([lambda: ConstantReward(limit=5)]), batch_size=16)
    agent.learn(64)
    assert agent.num_timesteps == 64


def test_episodes_of_a_single_step_are_learned_from() -> None:
    agent = tiny_agent(vectorized(lambda: ConstantReward(limit=1, truncates=False), 2), batch_size=16)
    agent.learn(128)
    assert agent.rollout_buffer.terminated.all()
    np.testing.assert_allclose(agent.rollout_buffer.returns, agent.rollout_buffer.rewards)
