"""I4: attacks on a running agent stay in their ball, leave the environment alone, and are ordered by strength."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tailguard import DistributionalPPO
from tailguard.env import oracle_env
from tailguard.errors import ConfigError
from tailguard.market.oracles import oracle_market
from tailguard.robustness import make_attack, play
from tailguard.robustness.attacks import ball_around, nobody
from tailguard.robustness.learned import AttackEnv, ObservationLever
from tailguard.robustness.play import Moment, Victim
from tailguard.robustness.prices import PriceLever, ShownPrices
from tests.agents import tiny_agent
from tests.environments import pendulum

REGIME = oracle_market("regime")


def sensitive(agent: DistributionalPPO) -> DistributionalPPO:
    """An untrained agent whose actions follow what it sees."""
    with torch.no_grad():
        agent.policy.action_head.mean.weight.mul_(100.0)
    return agent


def swinging() -> DistributionalPPO:
    return sensitive(tiny_agent(pendulum(4, 0)))


def trading(n_envs: int = 4, market: Any = REGIME) -> DistributionalPPO:
    return sensitive(tiny_agent(oracle_env(market, n_envs, n_bars=3_000, episode_length=20)))


def shown_by(agent: DistributionalPPO, attacker: Any, steps: int = 15) -> tuple[Tensor, Tensor]:
    """(S, N, F) the truth, and what the agent was shown."""
    victim = Victim(agent)
    victim.reset()
    truth, shown = [], []
    for _ in range(steps):
        moment = victim.moment()
        truth.append(moment.observations)
        shown.append(attacker(moment))
        victim.step(moment, shown[-1])
    return torch.stack(truth), torch.stack(shown)


@pytest.mark.parametrize("name", ["random", "critic", "mad"])
def test_an_attack_stays_in_the_ball_and_within_what_can_be_observed(name: str) -> None:
    agent = swinging()
    truth, shown = shown_by(agent, make_attack(name, agent, 0.3))
    assert float((shown - truth).abs().max()) <= 0.3 + 1e-6
    assert float((shown - truth).abs().max()) > 0.2
    assert float(shown.abs().max()) <= 1.0 + 1e-6  # cosine and sine


def test_maximal_difference_changes_actions_more_than_luck() -> None:
    changes = {name: play(swinging(), make_attack(name, swinging(), 0.1), 4).change for name in ("random", "mad")}
    assert changes["mad"] > 1.5 * changes["random"] > 0.0


def test_the_critic_attack_lowers_the_value_that_the_agents_critics_see() -> None:
    agent = swinging()
    victim = Victim(agent)
    victim.reset()
    moment = victim.moment()

    def value(observations: Tensor) -> float:
        return float((agent.policy.predict_law(observations.numpy()) @ agent.policy.masses).mean())

    shown = make_attack("critic", agent, 0.3)(moment)
    luck = [make_attack("random", agent, 0.3, seed)(moment) for seed in range(20)]
    assert value(shown) < min(value(seen) for seen in luck)


def test_nobody_changes_nothing_and_the_same_seed_plays_the_same_episodes() -> None:
    first, again = (play(swinging(), nobody, 4, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first.returns, again.returns)
    assert first.change == 0.0
    assert len(first.returns) == 4
    np.testing.assert_array_equal(first.returns, play(swinging(), make_attack("mad", swinging(), 0.0), 4, 3).returns)
    assert not np.array_equal(first.returns, play(swinging(), nobody, 4, seed=4).returns)


def test_a_victim_acts_as_predict_does() -> None:
    agent = swinging()
    victim = Victim(agent)
    victim.reset()
    state, starts = None, np.ones(4, bool)
    for _ in range(5):
        moment = victim.moment()
        expected, state = agent.predict(victim.observations, state, starts, deterministic=True)
        head = agent.policy.action_head
        np.testing.assert_allclose(head.to_env(head.mode(moment.unharmed).numpy()), expected, atol=1e-6)
        _, starts, _ = victim.step(moment, moment.observations)


def test_position_and_clock_are_spared_in_a_market() -> None:
    agent = trading()
    truth, shown = shown_by(agent, make_attack("mad", agent, 0.3))
    moved = (shown != truth).reshape(-1, truth.shape[-1]).any(0)
    assert moved.tolist() == [True, False]


@pytest.mark.parametrize("name", ["price-random", "price"])
def test_a_price_attack_moves_returns_by_what_prices_can_move_and_no_more(name: str) -> None:
    agent = trading()
    truth, shown = shown_by(agent, make_attack(name, agent, 5.0, features=REGIME.features))
    moved = (shown - truth)[..., 0] * REGIME.volatility  # the feature is the return over the volatility
    assert not (shown != truth)[..., 1].any()
    assert float(moved.abs().max()) <= 10.2e-4  # two neighbouring prices, five bps each
    assert float(moved.abs().max()) > 5e-4
    assert float(moved.cumsum(0).abs().max()) <= 5.5e-4  # and the price shown is never further than five from the truth


def test_recomputed_features_are_the_environments_own_where_nothing_is_moved() -> None:
    env = oracle_env(REGIME, 4, n_bars=3_000, episode_length=20)
    shown = ShownPrices(env, REGIME.features, 5.0)
    observations = torch.from_numpy(env.reset())
    seen = shown.seen(observations, np.zeros((4, 2, 1)))
    torch.testing.assert_close(seen, observations.unsqueeze(1).expand_as(seen), atol=1e-6, rtol=0)


def test_an_attackers_environment_pays_what_the_agent_loses() -> None:
    agent = swinging()
    env = AttackEnv(agent, ObservationLever(ball_around(agent, 0.3)))
    assert env.action_space.shape == (2,)
    assert env.reset().shape == (4, 3)
    actions = np.ones((4, 2), np.float32)
    _, rewards, dones, _ = env.step(actions)
    assert (rewards > 0.0).all()  # a pendulum's reward is negative
    assert dones.shape == (4,)


def test_a_price_lever_moves_only_what_is_computed_from_prices() -> None:
    agent = trading()
    lever = PriceLever(ShownPrices(agent.get_env(), REGIME.features, 5.0))  # type: ignore[arg-type]
    truth, shown = shown_by(agent, lambda moment: lever.pull(moment, torch.ones(len(moment.starts), 1)), steps=3)
    moved = (shown - truth)[..., 0] * REGIME.volatility
    assert (moved[0] > 4.9e-4).all()  # the first bar is lifted,
    assert float(moved[1:].abs().max()) < 1e-6  # and all after it by the same, so no return changes


@pytest.mark.parametrize("name", ["learned", "price-learned"])
def test_a_learned_attacker_is_trained_and_attacks(name: str) -> None:
    agent = trading()
    options = {"features": REGIME.features} if name.startswith("price") else {}
    attacker = make_attack(name, agent, 0.3, steps=512, **options)
    truth, shown = shown_by(agent, attacker)
    assert (shown != truth).any()
    assert np.isfinite(play(agent, attacker, 4).returns).all()


def test_unknown_attacks_and_prices_without_bars_are_refused() -> None:
    agent = swinging()
    with pytest.raises(ConfigError, match='Did you mean "mad"'):
        make_attack("mda", agent, 0.1)
    with pytest.raises(ConfigError, match="trades bars"):
        make_attack("price", agent, 5.0)


def test_short_episodes_are_not_counted_more_often() -> None:
    agent = tiny_agent()

    def attack(moment: Moment) -> Tensor:
        return moment.observations

    played = play(agent, attack, 10)
    assert len(played.returns) == 12  # three of each of four environments
    np.testing.assert_array_equal(played.returns, played.lengths)
