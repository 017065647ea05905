"""TradingVecEnv against its contract: SB3, Gymnasium, saving, episodes, and no sight of the future."""

from __future__ import annotations

import json
import warnings

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check
from numpy.testing import assert_allclose, assert_array_equal
from random_markets import random_bars
from stable_baselines3.common.env_checker import check_env as sb3_check
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize

from tailguard.env import (
    AccountRules,
    Costs,
    EnvConfig,
    TradingEnv,
    TradingVecEnv,
    TradingVectorEnv,
    replay,
    sequential,
)
from tailguard.env.accounting import Account, equity
from tailguard.errors import ConfigError, DataError, NonFiniteError, StateError
from tailguard.market import Bars


def returns_feature(bars: Bars) -> np.ndarray:
    """(T, A, 2) one-bar return and a trailing mean of it; causal, look-back 3."""
    close = bars.close
    change = np.full(close.shape, np.nan)
    change[1:] = close[1:] / close[:-1] - 1.0
    mean = np.full(close.shape, np.nan)
    mean[3:] = (change[3:] + change[2:-1] + change[1:-2]) / 3
    return 100.0 * np.stack([change, mean], axis=-1)


def make(bars: Bars | None = None, n_envs: int = 4, **changes) -> TradingVecEnv:
    bars = random_bars() if bars is None else bars
    options = {name: changes.pop(name) for name in ("window", "seed") if name in changes}
    config = EnvConfig(**{"episode_length": 30, **changes})
    return TradingVecEnv(
        bars, returns_feature(bars), ["return", "mean"], n_envs=n_envs, look_back=3, config=config, **options
    )


def random_actions(env: TradingVecEnv, seed: int, n_steps: int) -> np.ndarray:
    shape = (n_steps, env.num_envs, *env.action_space.shape)
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def run(env: TradingVecEnv, actions: np.ndarray) -> list[np.ndarray]:
    """Observations, rewards, dones and equity of every step, stacked."""
    rows = []
    for action in actions:
        observation, reward, done, infos = env.step(action)
        rows.append((observation, reward, done, np.array([info["equity"] for info in infos])))
    return [np.stack(column) for column in zip(*rows, strict=True)]


def test_the_observation_is_named():
    env = make()
    assert env.layout.names == (
        *("return:S0", "mean:S0", "return:S1", "mean:S1"),
        *("weight:S0", "weight:S1", "unrealised:S0", "unrealised:S1", "time_left", "period_return"),
    )
    assert env.observation_space.shape == (10,)
    observation = env.reset()
    assert observation.dtype == np.float32
    t = env.t
    assert_array_equal(observation[:, :4], returns_feature(env.bars)[t].reshape(4, 4).astype(np.float32))
    assert_array_equal(observation[:, 4:], [[0, 0, 0, 0, 1, 0]] * 4)
    assert env.layout["time_left"] == 8
    assert env.layout.columns_of("weight") == [4, 5]
    with pytest.raises(ConfigError, match="weigth"):
        env.layout["weigth"]


def test_parts_of_the_agent_state_can_be_left_out():
    env = make(agent_state=("weight", "time_left"))
    assert env.layout.names[4:] == ("weight:S0", "weight:S1", "time_left")
    assert_array_equal(env.reset()[:, 4:], [[0, 0, 1]] * 4)


def test_the_agent_sees_its_own_account():
    env = make(costs=Costs(impact=0.0))
    env.reset()
    total = np.zeros(4)
    for action in random_actions(env, 1, 29):
        observation, reward, _, infos = env.step(action)
        total += env.rewards
        account = Account(env._accounts.cash, env.units, env._accounts.entry)
        mark = env.bars.close[env.t]
        assert_allclose(equity(account, mark), env.equity, rtol=1e-12)
        assert_allclose(observation[:, 4:6], env.units * mark / env.equity[:, None], rtol=1e-5, atol=1e-7)
        assert_allclose(
            observation[:, 6:8],
            100 * env.units * (mark - env._accounts.entry) / env.equity[:, None],
            rtol=1e-4,
            atol=1e-5,
        )
        assert_allclose(observation[:, 9], 100 * np.log(env.equity / 1e5), rtol=1e-5, atol=1e-6)
        assert_allclose(reward, env.rewards, rtol=1e-6)
        assert [info["equity"] for info in infos] == env.equity.tolist()
    assert_allclose(total, np.log(env.equity / 1e5), rtol=1e-12)


def test_episodes_end_by_truncation_with_the_last_observation_in_the_info():
    env = make()
    env.reset()
    for step, action in enumerate(random_actions(env, 2, 60), start=1):
        observation, _, done, infos = env.step(action)
        assert done.all() == (step % 30 == 0)
        if done.all():
            for n, info in enumerate(infos):
                assert info["TimeLimit.truncated"] is True
                assert info["episode"]["l"] == 30
                assert_allclose(info["episode"]["r"], np.log(info["equity"] / 1e5), rtol=1e-9)
                assert info["terminal_observation"][8] == 0.0
                assert observation[n, 8] == 1.0
            assert (env.equity == 1e5).all()


def test_ruin_is_a_termination():
    n = 60
    price = np.where(np.arange(n) < 40, 100.0, 5.0)[:, None]
    bars = Bars.from_arrays(random_bars(n).ts, ["X"], price, price, price, price, np.ones((n, 1)))
    env = TradingVecEnv(
        bars, n_envs=1, config=EnvConfig(episode_length=50, random_start=False, costs=Costs(impact=0.0))
    )
    env.reset()
    for _ in range(40):
        _, reward, done, infos = env.step(np.ones((1, 1)))
    assert done[0]
    assert infos[0]["TimeLimit.truncated"] is False
    assert_allclose(reward[0], np.log(infos[0]["equity"] / 1e5), rtol=1e-3)


def test_a_debt_has_a_finite_reward():
    n = 60
    price = np.where(np.arange(n) < 40, 100.0, 500.0)[:, None]
    bars = Bars.from_arrays(random_bars(n).ts, ["X"], price, price, price, price, np.ones((n, 1)))
    env = TradingVecEnv(
        bars, n_envs=1, config=EnvConfig(episode_length=50, random_start=False, costs=Costs(impact=0.0))
    )
    env.reset()
    for _ in range(40):
        observation, reward, done, infos = env.step(-np.ones((1, 1)))
    assert done[0]
    assert infos[0]["equity"] < 0
    assert_allclose(reward[0], np.log(1e-3), rtol=0.01)
    assert np.isfinite(observation).all()


@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_rewriting_the_future_leaves_the_past_bit_identical(missing):
    bars = random_bars(200, 3, missing=missing)
    t = 120
    features = np.random.default_rng(0).normal(size=(200, 3, 2))
    outcomes = []
    for market in (bars, bars.scale_after(t, 3.0)):
        env = TradingVecEnv(market, features, n_envs=1, config=EnvConfig(episode_length=None, random_start=False))
        first = env.reset()
        outcomes.append((first, *run(env, random_actions(env, 3, t))))
    for left, right in zip(*outcomes, strict=True):
        assert_array_equal(left, right)


def test_rewriting_the_future_does_change_the_future():
    """The test above would pass on an environment that ignores its bars."""
    bars = random_bars(200, 3)
    equities = []
    for market in (bars, bars.scale_after(120, 3.0)):
        env = TradingVecEnv(market, n_envs=1, config=EnvConfig(episode_length=None, random_start=False))
        env.reset()
        equities.append(run(env, random_actions(env, 3, 121))[3])
    assert_array_equal(equities[0][:120], equities[1][:120])
    assert equities[0][120] != equities[1][120]


def test_the_same_seed_gives_the_same_run_and_another_seed_another():
    actions = random_actions(make(), 4, 70)
    runs = []
    for seed in (7, 7, 8):
        env = make(seed=seed)
        env.reset()
        runs.append(run(env, actions))
    for left, right in zip(runs[0], runs[1], strict=True):
        assert_array_equal(left, right)
    assert (runs[0][0] != runs[2][0]).any()


def test_seed_before_reset_starts_that_seed_again():
    env = make(seed=1)
    env.seed(5)
    first = env.reset()
    env.reset()
    env.seed(5)
    assert_array_equal(env.reset(), first)
    assert_array_equal(make(seed=5).observe(), first)


def test_environments_stepped_together_equal_each_stepped_alone():
    together = make(n_envs=5, seed=10)
    actions = random_actions(together, 5, 80)
    together.reset()
    whole = run(together, actions)
    for n in range(5):
        alone = make(n_envs=1, seed=10 + n)
        alone.reset()
        for left, right in zip(run(alone, actions[:, n : n + 1]), whole, strict=True):
            assert_array_equal(left[:, 0], right[:, n])


def test_starts_cover_the_window_evenly_and_stay_inside():
    env = make(random_bars(100), n_envs=50, window=(10, 90))
    starts = []
    for _ in range(100):
        env.reset()
        starts.append(env.t.copy())
    counts = np.bincount(np.concatenate(starts), minlength=100)
    assert counts[:10].sum() == 0
    assert counts[60:].sum() == 0  # 60 + 30 steps would need bar 90
    assert counts[10:60].min() > 60  # 100 expected
    assert counts[10:60].max() < 145


def test_saved_state_goes_on_exactly_and_survives_json():
    env = make()
    env.reset()
    actions = random_actions(env, 6, 100)
    run(env, actions[:43])
    saved = env.state_dict()
    frozen = json.loads(json.dumps({k: v if isinstance(v, str) else v.tolist() for k, v in saved.items()}))
    now, rest = env.observe(), run(env, actions[43:])
    for state in (saved, frozen):
        twin = make(seed=99)
        twin.load_state_dict(state)
        assert_array_equal(twin.observe(), now)
        for left, right in zip(run(twin, actions[43:]), rest, strict=True):
            assert_array_equal(left, right)


def test_state_of_another_environment_is_refused():
    state = make().state_dict()
    with pytest.raises(StateError, match="other bars"):
        make(random_bars(seed=1)).load_state_dict(state)
    with pytest.raises(StateError, match="n_envs"):
        make(n_envs=3).load_state_dict(state)
    with pytest.raises(StateError, match="missing"):
        make().load_state_dict({"t": state["t"]})


def test_a_missing_bar_trades_nothing_and_shows_zero_features():
    bars = random_bars(200, 2, missing=0.3)
    env = TradingVecEnv(bars, np.ones((200, 2, 1)), n_envs=1, config=EnvConfig(episode_length=None, random_start=False))
    env.reset()
    for t, action in enumerate(random_actions(env, 7, 199), start=1):
        held = env.units.copy()
        observation, _, _, _ = env.step(action)
        if t < 199:
            closed = ~bars.tradable[t]
            assert_array_equal(env.units[0][closed], held[0][closed])
            assert_array_equal(observation[0, :2], bars.tradable[t].astype(np.float32))


@pytest.mark.parametrize("rules", [{}, {"long_only": True}])
@pytest.mark.parametrize("n_assets", [1, 2])
def test_the_gymnasium_view_passes_both_checkers(rules, n_assets):
    env = TradingEnv(make(random_bars(n_assets=n_assets), n_envs=1, account=AccountRules(**rules)))
    with warnings.catch_warnings():
        # both checkers advise about unbounded observations, rendering and asymmetric action bounds
        warnings.simplefilter("ignore")
        gymnasium_check(env, skip_render_check=True)
        sb3_check(env)


def test_the_gymnasium_view_separates_truncation_from_termination():
    env = TradingEnv(make(n_envs=1))
    first, _ = env.reset(seed=3)
    for step in range(1, 31):
        observation, reward, terminated, truncated, info = env.step(np.zeros(2, dtype=np.float32))
        assert (terminated, truncated, reward) == (False, step == 30, 0.0)
    assert observation[8] == 0.0
    assert info["episode"]["l"] == 30
    again, _ = env.reset(seed=3)
    assert_array_equal(first, again)


def test_the_vector_view_agrees_with_the_vec_env():
    vec, view = make(seed=3), TradingVectorEnv(make(seed=0))
    observation, _ = view.reset(seed=3)
    assert_array_equal(observation, vec.observe())
    assert view.observation_space.contains(observation)
    for action in random_actions(vec, 8, 40):
        expected, _, done, infos = vec.step(action)
        observation, reward, terminated, truncated, info = view.step(action)
        assert_array_equal(observation, expected)
        assert_array_equal(reward, vec.rewards)
        assert_array_equal(terminated | truncated, done)
        if done.any():
            assert truncated.all()
            assert_array_equal(np.stack(info["final_obs"]), [one["terminal_observation"] for one in infos])
    wrapped = gym.wrappers.vector.RecordEpisodeStatistics(TradingVectorEnv(make()))
    wrapped.reset(seed=1)
    wrapped.step(wrapped.action_space.sample())
    wrapped.close()


def test_it_lives_inside_sb3_wrappers():
    with pytest.warns(UserWarning, match="already wrapped"):  # episodes are in the info already
        monitored = VecMonitor(make())
    env = VecNormalize(monitored, norm_reward=False)
    env.reset()
    for action in random_actions(env.unwrapped, 9, 31):
        _, _, _, infos = env.step(action)
        assert {"equity", "costs", "turnover"} <= set(infos[0])
    assert env.get_attr("render_mode") == [None] * 4
    assert env.env_method("observe", indices=[0])[0].shape == (4, 10)


def test_sequential_replay_runs_the_window_once_and_warm_up_does_not_trade():
    env = make(random_bars(300))
    record = replay(sequential(env, 100, 200), lambda observation: np.full((1, 2), 0.4))
    assert_array_equal(record.bar[:, 0], np.arange(101, 200))
    assert record.done[-1]
    assert not record.done[:-1].any()
    assert_allclose(record.reward.sum(), np.log(record.equity[-1, 0] / 1e5))
    warm = replay(sequential(env, 80, 200), lambda observation: np.full((1, 2), 0.4), warm_up=20)
    assert_array_equal(warm.equity, record.equity)
    assert_array_equal(warm.bar, record.bar)


def test_replay_keeps_the_memory_of_a_recurrent_policy():
    class Counter:
        """Acts on how many steps it has seen since the episode began."""

        def predict(self, observation, state=None, episode_start=None, deterministic=False):
            state = np.zeros(len(observation)) if state is None else state
            state = np.where(episode_start, 0.0, state + 1.0)
            return np.repeat(state[:, None] / 100.0, 2, axis=1), state

    record = replay(make(costs=Costs(fee_bps=0, half_spread_bps=0, slippage_bps=0, impact=0)), Counter(), 60)
    assert record.turnover[0].max() == 0.0
    assert (record.turnover[1:30] > 0).all()
    assert record.turnover[30].max() == 0.0


def test_bad_input_is_named():
    env = make()
    env.reset()
    with pytest.raises(NonFiniteError, match="environment 2 for 'S1' is nan"):
        env.step(np.where(np.arange(8).reshape(4, 2) == 5, np.nan, 0.0))
    with pytest.raises(ConfigError, match="episode_length"):
        make(random_bars(20))
    with pytest.raises(DataError, match="look_back"):
        TradingVecEnv(random_bars(), returns_feature(random_bars()), look_back=0)
    with pytest.raises(ConfigError, match="shape"):
        TradingVecEnv(random_bars(), np.zeros((10, 2, 1)))
    with pytest.raises(ConfigError, match="share one object"):
        env.set_attr("look_back", 1, indices=[0])
