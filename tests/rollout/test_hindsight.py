"""What the world did is taken out of the advantages; what the action did stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tailguard.env import oracle_env
from tailguard.errors import EnvContractError
from tailguard.market.oracles import oracle_market
from tailguard.rollout.hindsight import hindsight_baseline
from tests.agents import collected, tiny_agent

MEANT, NOISE = 0.5, 0.1


def a_bet(n_steps: int = 200, n_envs: int = 64, jump: float = -20.0) -> tuple[np.ndarray, ...]:
    """A position earns position times move; moves are noise around a drift, with a rare jump."""
    rng = np.random.default_rng(0)
    shape = (n_steps, n_envs)
    moves = 0.1 + rng.normal(size=shape) + jump * (rng.uniform(size=shape) < 0.005)
    meant = MEANT + 0.2 * rng.normal(size=shape)
    tried = NOISE * rng.normal(size=shape)
    return (meant + tried) * moves, meant[..., None], moves[..., None], tried


def test_it_explains_luck_and_leaves_the_slope_in_the_action() -> None:
    advantages, place, moves, tried = a_bet()
    relieved = advantages - hindsight_baseline(advantages, place, moves)
    assert relieved.var() < 0.06 * advantages.var()  # the noise that is left is that of the action itself
    slope = (relieved * tried).mean() / np.square(tried).mean()
    spread = (relieved * tried).std() / np.square(tried).mean() / np.sqrt(tried.size)
    assert abs(slope - moves.mean()) < 3.0 * spread
    assert spread < 0.4 * (advantages * tried).std() / np.square(tried).mean() / np.sqrt(tried.size)


def test_no_sample_has_a_say_in_its_own_baseline() -> None:
    advantages, place, moves, _ = a_bet(jump=0.0)
    changed = advantages.copy()
    changed[:, ::2] += np.random.default_rng(1).normal(size=changed[:, ::2].shape)
    before, after = (hindsight_baseline(a, place, moves) for a in (advantages, changed))
    ratio = after[:, ::2] / before[:, ::2]  # of those whose fit did not change: one factor for all of them
    np.testing.assert_allclose(ratio, np.median(ratio), rtol=1e-6)


def test_moves_that_explain_nothing_change_next_to_nothing() -> None:
    rng = np.random.default_rng(0)
    advantages, place = rng.normal(size=(100, 32)), rng.normal(size=(100, 32, 2))
    baseline = hindsight_baseline(advantages, place, rng.normal(size=(100, 32, 1)))
    assert np.square(baseline).mean() < 0.02


def test_a_market_says_how_its_prices_moved_also_where_an_episode_ended() -> None:
    env = oracle_env(oracle_market("regime"), n_envs=3, n_bars=2_000, episode_length=4)
    env.reset()
    close = env.bars.close
    for _ in range(9):
        left = env.t.copy()
        env.step(np.zeros((3, 1)))
        np.testing.assert_allclose(env.exogenous, close[left + 1] / close[left] - 1.0)


def test_an_agent_takes_the_prices_out_and_an_environment_without_any_is_refused() -> None:
    market = oracle_market("regime", cost_bps=0.0)
    settings = {"hindsight": True, "gae_lambda": 0.0, "policy_kwargs": {"log_std_init": -2.0}}
    agent = tiny_agent(oracle_env(market, n_envs=8, n_bars=2_000), **settings)
    with torch.no_grad():
        agent.policy.action_head.mean.bias.fill_(0.8)  # a position for prices to move
    buffer = collected(agent).rollout_buffer
    advantages = buffer.advantages.copy()
    relieved, figures = agent.hindsight.apply(buffer, advantages)
    assert relieved.var() < 0.2 * advantages.var()
    assert next(iter(figures.values())) == pytest.approx(1.0 - relieved.var() / advantages.var())
    with pytest.raises(EnvContractError, match="exogenous"):
        tiny_agent(hindsight=True).learn(64)


def test_columns_hidden_from_the_critics_do_not_move_their_word_but_the_actors() -> None:
    env = oracle_env(oracle_market("regime"), n_envs=2, n_bars=2_000)
    agent = tiny_agent(env, policy_kwargs={"hidden_from_critics": [1]})
    seen = np.array([[0.3, -1.0], [0.3, 1.0]], np.float32)
    low, high = agent.predict_quantiles(seen)
    np.testing.assert_array_equal(low, high)
    actions, (hidden, _) = agent.predict(seen, deterministic=True)
    assert actions[0] != actions[1]
    np.testing.assert_array_equal(hidden[1:, 0], hidden[1:, 1])  # memories of the critics, behind the actor's


def test_samples_that_do_not_count_have_no_say_in_the_baseline_of_others() -> None:
    advantages, place, moves, _ = a_bet(jump=0.0)
    valid = np.random.default_rng(2).random(advantages.shape) < 0.7
    spoiled = np.where(valid, advantages, 1e6)
    baselines = [hindsight_baseline(values, place, moves, valid)[valid] for values in (advantages, spoiled)]
    np.testing.assert_array_equal(*baselines)
    assert np.var(advantages[valid] - baselines[0]) < 0.1 * np.var(advantages[valid])
