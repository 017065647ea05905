"""Steps that an environment marks with info["valid"] = False: nothing is learned from them, whatever wraps it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecEnv, VecNormalize

from tailguard import DistributionalPPO
from tailguard.checkpoint import state_digest
from tailguard.env import AccountRules, EnvConfig, TradingVecEnv, oracle_env
from tailguard.env.oracle import oracle_config
from tailguard.errors import EnvContractError
from tailguard.market import Bars
from tailguard.market.oracles import oracle_market
from tests.agents import collected, logged, tiny_agent

N_STEPS, N_ENVS = 32, 4
OFTEN = ("VV__VV", "_V", "V", "VVV_")
"""Of each environment: which steps are valid, over and over; none of them in step with the others."""


class Pausing(gym.Env[Any, Any]):
    """Pays for the right one of two actions; `pattern` says which steps count ("V") and which do not ("_")."""

    observation_space = spaces.Box(-8.0, 8.0, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, pattern: str, ends: str = "truncated", length: int = 9, paid: str = "V_") -> None:
        self.pattern, self.ends, self.length, self.paid = pattern, ends, length, paid
        self.total = 0  # steps of all episodes: the pattern goes on where an episode ends

    def look(self) -> Any:
        """A clue, the clock, and whether the step from here counts."""
        self.clue = float(self.np_random.normal())
        return np.array([self.clue, self.clock / self.length, self.now() == "V"], np.float32)

    def now(self) -> str:
        return self.pattern[self.total % len(self.pattern)]

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.clock = 0
        return self.look(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        said, right = self.now(), int(action) == (self.clue > 0.0)
        info = {} if said == "V" else {"valid": False}
        self.clock += 1
        self.total += 1
        over = self.clock >= self.length
        reward = float(right) if said in self.paid else 0.0
        return self.look(), reward, over and self.ends == "terminated", over and self.ends == "truncated", info


def pausing(*patterns: str, kind: Any = DummyVecEnv, seed: int = 0, **settings: Any) -> VecEnv:
    """One environment per pattern."""
    env = kind([partial(Pausing, pattern, **settings) for pattern in patterns])
    env.seed(seed)
    return env


def expected(patterns: tuple[str, ...], first: int = 0) -> np.ndarray:
    """(T, N) what the environments say in a rollout that begins at their step `first`."""
    return np.array([[p[t % len(p)] == "V" for p in patterns] for t in range(first, first + N_STEPS)])


def normalized(*patterns: str) -> VecEnv:
    return VecNormalize(pausing(*patterns), norm_obs=True, norm_reward=False)


WRAPPED = {
    "dummy": pausing,
    "processes": partial(pausing, kind=SubprocVecEnv),
    "normalized": normalized,
}


@pytest.mark.parametrize("wrapping", WRAPPED)
def test_the_buffer_holds_what_the_environments_say(wrapping: str) -> None:
    env = WRAPPED[wrapping](*OFTEN)
    try:
        agent = collected(tiny_agent(env))
        np.testing.assert_array_equal(agent.rollout_buffer.valid, expected(OFTEN))
        agent.train()
        assert agent.collect_rollouts(env, NothingHeard(agent), agent.rollout_buffer, N_STEPS)
        np.testing.assert_array_equal(agent.rollout_buffer.valid, expected(OFTEN, N_STEPS))  # nothing of the last one
    finally:
        env.close()


class NothingHeard(BaseCallback):
    """A callback between two rollouts of one `learn`."""

    def __init__(self, model: DistributionalPPO) -> None:
        super().__init__()
        self.init_callback(model)

    def _on_step(self) -> bool:
        return True


@pytest.mark.parametrize("said", ["no", 0, None])
def test_anything_but_a_bool_is_refused_with_environment_and_step(said: Any) -> None:
    class Vague(Pausing):
        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            *result, info = super().step(action)
            return *result, {"valid": said} if self.total == 4 else info  # type: ignore[return-value]

    with pytest.raises(EnvContractError, match=r'info\["valid"\] of environment 0 at step 3 of the rollout is'):
        tiny_agent(DummyVecEnv([lambda: Vague("V")] * 2)).learn(64)


@pytest.mark.parametrize("ends", ["truncated", "terminated"])
def test_episodes_that_end_in_an_invalid_step_end_like_others(ends: str) -> None:
    patterns = ("V" * 8 + "_",) * N_ENVS  # every episode's last step
    agent = collected(tiny_agent(pausing(*patterns, ends=ends), gae_lambda=1.0))
    buffer = agent.rollout_buffer
    over = buffer.truncated if ends == "truncated" else buffer.terminated
    assert over.sum() == 3 * N_ENVS
    np.testing.assert_array_equal(~buffer.valid, over)
    after = buffer.values[1:].copy()
    after[over] = buffer.terminal_values[over]
    assert (buffer.terminal_values[over] != 0.0).all() == (ends == "truncated")
    going_on = agent.config.gamma * after[-1]
    for t in range(N_STEPS - 1, -1, -1):  # the return of every step, with the episode's own last reward in it
        ahead = np.where(over[t], agent.config.gamma * buffer.terminal_values[t], going_on)
        returned = buffer.rewards[t] + ahead
        np.testing.assert_allclose(buffer.returns[t], returned, rtol=1e-6)
        going_on = agent.config.gamma * returned
    agent.train()
    assert logged(agent)["train/first_log_ratio_max_abs"] <= 1e-5


def test_rewards_of_invalid_steps_belong_to_the_returns_of_the_steps_before() -> None:
    agent = collected(tiny_agent(pausing(*["VV_"] * N_ENVS, paid="_", length=30), gae_lambda=1.0, gamma=0.9))
    buffer = agent.rollout_buffer
    earned = buffer.returns - 0.9 ** (30 - np.arange(N_STEPS))[:, None] * buffer.terminal_values[29]
    to_go = [sum(0.9 ** (i - t) * buffer.rewards[i] for i in range(t, 30)) for t in range(30)]
    np.testing.assert_allclose(earned[:30], to_go, rtol=1e-6, atol=1e-6)
    assert buffer.rewards[buffer.valid].sum() == 0.0
    assert buffer.rewards.sum() > 0.0


@pytest.mark.parametrize("risk", [{}, {"mode": "episode", "weight": 0.5, "alpha": 0.25, "horizon": 12}])
def test_nothing_is_bootstrapped_from_the_value_of_an_invalid_step(risk: dict[str, Any]) -> None:
    """The critics of the second agent think otherwise of such steps, and of no others: nothing may follow from it."""
    found = []
    for opinion in (0.0, 5.0):
        agent = tiny_agent(pausing(*["VV__V"] * N_ENVS, length=10), "MlpPolicy", n_steps=31, risk=risk)
        with torch.no_grad():
            for critic in agent.policy.critics:
                first = next(layer for layer in critic.trunk.layers if isinstance(layer, torch.nn.Linear))
                first.weight[:, 2] -= opinion  # of the observation "this step counts" ...
                first.bias += opinion  # ... and only where it is 0
        collected(agent)
        found.append((agent.rollout_buffer, agent.sequences()))
    (plain, learned), (other, learned_other) = found
    valid = plain.valid
    assert not valid.all()
    assert np.abs(plain.values[:-1][~valid] - other.values[:-1][~valid]).min() > 1e-3
    np.testing.assert_allclose(plain.values[:-1][valid], other.values[:-1][valid], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(plain.advantages[valid], other.advantages[valid], rtol=1e-3, atol=1e-4)
    counted = learned.valid
    torch.testing.assert_close(learned.target[counted], learned_other.target[counted], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(learned.advantages[counted], learned_other.advantages[counted], rtol=1e-2, atol=1e-3)


def test_advantages_are_normalized_over_the_steps_that_count() -> None:
    agent = collected(tiny_agent(pausing(*OFTEN)))
    batch = agent.sequences()
    counted = batch.advantages[batch.valid].double()
    assert int(batch.valid.sum()) == int(expected(OFTEN).sum())
    assert float(counted.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(counted.std(correction=0)) == pytest.approx(1.0, rel=1e-5)
    assert not batch.advantages[~batch.valid].any()


def test_what_was_done_in_an_invalid_step_moves_no_weight_and_no_figure() -> None:
    def trained(spoil: bool) -> DistributionalPPO:
        agent = collected(tiny_agent(pausing(*OFTEN)))
        buffer = agent.rollout_buffer
        if spoil:
            buffer.actions[~buffer.valid] = 1.0 - buffer.actions[~buffer.valid]
            buffer.log_probs[~buffer.valid] -= 3.0
        agent.train()
        return agent

    one, two = trained(False), trained(True)
    for (name, plain), spoiled in zip(one.policy.named_parameters(), two.policy.parameters(), strict=True):
        assert torch.equal(plain, spoiled), name
    figures = [{k: v for k, v in logged(agent).items() if not k.startswith("time/")} for agent in (one, two)]
    assert figures[0] == figures[1]


@pytest.mark.parametrize("micro", [8, 24, 40])
def test_micro_batches_weigh_unequal_masks_right(micro: int) -> None:
    patterns = ("V", "_", "_V__", "V" * 8 + "_" * 24)  # one environment never counts, one only in its first sequence
    whole, split = (
        collected(tiny_agent(pausing(*patterns), n_epochs=1, batch_size=128, ev_reserve=0.0, microbatch_size=size))
        for size in (None, micro)
    )
    np.testing.assert_array_equal(split.rollout_buffer.valid, expected(patterns))
    whole.train()
    split.train()
    for name in ("train/grad_norm", "train/critic1_grad_norm", "train/critic2_grad_norm", "train/value_loss"):
        assert logged(split)[name] == pytest.approx(logged(whole)[name], rel=1e-5), name


def test_where_nothing_counts_nothing_is_learned_until_something_does() -> None:
    agent = tiny_agent(pausing(*["_" * 64 + "V" * 64] * N_ENVS))  # two rollouts, then two others
    before = {name: parameter.detach().clone() for name, parameter in agent.policy.named_parameters()}
    agent.learn(2 * N_STEPS * N_ENVS)
    assert all(torch.equal(before[name], parameter) for name, parameter in agent.policy.named_parameters())
    assert agent._n_updates == 0
    assert logged(agent)["warn/empty_epoch"] == 1.0
    assert logged(agent)["train/empty_epochs"] == 1.0
    agent.learn(2 * N_STEPS * N_ENVS, reset_num_timesteps=False)
    assert agent._n_updates == 2 * agent.config.n_epochs
    assert not all(torch.equal(before[name], parameter) for name, parameter in agent.policy.named_parameters())
    assert "warn/empty_epoch" not in logged(agent)


def test_a_reserve_without_a_step_that_counts_is_said_and_measured_again_when_there_is_one() -> None:
    class Heard(NothingHeard):
        def _on_rollout_start(self) -> None:
            if self.model.num_timesteps:
                self.said.append("train/explained_variance" in logged(self.model))  # type: ignore[arg-type]
                self.warned.append("warn/ev_reserve_all_masked" in logged(self.model))  # type: ignore[arg-type]
                self.logger.name_to_value.clear()

    rarely = "V" * 8 + "_" * 24  # one sequence of four
    agent = tiny_agent(pausing(rarely, "_", "_", "_", length=1000), ev_reserve=0.25)
    heard = Heard(agent)
    heard.said, heard.warned = [], []
    agent.learn(16 * N_STEPS * N_ENVS, heard, log_interval=1000)
    assert heard.said == [not warned for warned in heard.warned]
    assert 1 <= sum(heard.said) < len(heard.said)


# trading


def hourly_env(windows: tuple[str, ...], n_envs: int = 4, length: int = 60) -> TradingVecEnv:
    market = oracle_market("regime")
    account = AccountRules(gross_cap=market.gross_cap, no_trade_windows=windows)
    config = oracle_config(market, length).replace(account=account)
    return oracle_env(market, n_envs, 0, n_bars=3_000, config=config)


WINDOWS = ("21:00-02:00",)


def in_windows(env: TradingVecEnv, bar: Any) -> Any:
    hour = env.bars.ts[bar].astype("datetime64[h]").astype(int) % 24
    return (hour >= 21) | (hour < 2)


def test_no_order_fills_inside_a_no_trade_window_and_such_steps_do_not_count() -> None:
    env, rng = hourly_env(WINDOWS), np.random.default_rng(0)
    env.reset()
    seen = 0
    for _ in range(200):
        held, filled_at = env.units.copy(), env.t + 1
        _, _, dones, infos = env.step(rng.uniform(-1.0, 1.0, (4, 1)))
        closed = in_windows(env, filled_at)
        assert [info.get("valid", True) for info in infos] == (~closed).tolist()
        still = closed & ~dones
        np.testing.assert_array_equal(env.units[still], held[still])
        assert not env.turnover[closed].any()
        assert env.turnover[~closed].all()
        seen += int(closed.sum())
    assert seen > 100


@pytest.mark.parametrize("policy", ["MlpLstmPolicy", "MlpPolicy"])
def test_an_agent_that_trades_by_the_clock_resumes_exactly(policy: str, tmp_path: Path) -> None:
    whole = tiny_agent(hourly_env(WINDOWS), policy, hindsight=True)
    whole.learn(3 * N_STEPS * N_ENVS)
    masked = ~whole.rollout_buffer.valid
    assert 0 < masked.sum() < masked.size
    whole.checkpoint(tmp_path / "half")
    whole.learn(6 * N_STEPS * N_ENVS, reset_num_timesteps=False)
    again = DistributionalPPO.resume(tmp_path / "half", hourly_env(WINDOWS))
    again.learn(6 * N_STEPS * N_ENVS, reset_num_timesteps=False)
    np.testing.assert_array_equal(again.rollout_buffer.valid, whole.rollout_buffer.valid)
    one, two = ({name: part.state_dict() for name, part in agent.parts().items()} for agent in (whole, again))
    assert state_digest(one) == state_digest(two)


def test_bars_that_nobody_can_trade_do_not_count_either() -> None:
    source = oracle_market("regime").bars(400, 0)
    gone = np.arange(400) % 10 == 7
    tradable = ~gone[:, None]
    bars = Bars.from_arrays(
        source.ts, source.symbols, source.open, source.high, source.low, source.close, source.volume, tradable
    )
    env = TradingVecEnv(bars, n_envs=2, config=EnvConfig(episode_length=50))
    env.reset()
    for _ in range(120):
        filled_at = env.t + 1
        _, _, _, infos = env.step(np.ones((2, 1)))
        assert [info.get("valid", True) for info in infos] == (~gone[filled_at]).tolist()
