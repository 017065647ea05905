"""Alerts about an agent's steps and its money: raised by one fault, silent on the same agent without it."""

from __future__ import annotations

import pytest
import torch

from tailguard import DistributionalPPO
from tailguard.env import oracle_env
from tailguard.market.oracles import oracle_market
from tests.agents import tiny_agent

FEE_BPS = 5.0


def raised(agent: DistributionalPPO, updates: int) -> set[str]:
    """Every alert that begins within some updates."""
    heard: set[str] = set()
    agent.alerts.listeners.append(lambda alert, value: heard.add(alert.name))
    agent.learn(updates * agent.config.n_steps * agent.n_envs)
    return heard


def with_weight_decay_in_the_gradient(agent: DistributionalPPO, strength: float = 0.1) -> DistributionalPPO:
    """A penalty on the weights is added to the loss, instead of being left to the optimizer's weight_decay.

    To the gate every weight then seems to do harm in proportion to its square, and hardly any is of use.
    """
    for parameter in agent.policy.parameters():
        parameter.register_hook(lambda gradient, weights=parameter: gradient + strength * weights.detach())
    return agent


@pytest.mark.parametrize("gate", ["max", "minmax"])
@pytest.mark.parametrize("optimizer", ["upgd", "adaptive_upgd", "upgdw"])
def test_a_gate_that_changes_the_average_step_is_seen(optimizer: str, gate: str) -> None:
    settings = {"optimizer": optimizer, "optimizer_kwargs": {"gate": gate}}
    assert raised(tiny_agent(**settings), updates=7) == set()
    faulty = with_weight_decay_in_the_gradient(tiny_agent(**settings))
    assert raised(faulty, updates=7) == {"warn/upgd_gate_off_one"}


def eager_trader(fee_bps: float) -> DistributionalPPO:
    """Holds whatever sign a real, short-lived signal has, and never looks at what it holds already."""
    market = oracle_market("signal", cost_bps=fee_bps, r_squared=0.3, persistence=0.0)
    env = oracle_env(market, 32, 0, n_bars=20_000)
    agent = tiny_agent(env, "MlpPolicy", n_steps=64, batch_size=512, gamma=0.1)
    first, last = agent.policy.actor.layers[0], agent.policy.action_head.mean
    with torch.no_grad():
        for parameter in (first.weight, first.bias, last.weight, last.bias):  # type: ignore[union-attr]
            parameter.zero_()  # type: ignore[operator]
        first.weight[0, 0], last.weight[0, 0] = 1.0, 3.0  # type: ignore[index,union-attr]
    return agent


@pytest.mark.parametrize(
    ("fee_bps", "expected"),
    [(FEE_BPS, set()), (20.0 * FEE_BPS, {"warn/overtrading"})],
    ids=["fee_as_meant", "fee_in_another_unit"],
)
def test_costs_that_eat_what_trading_earns_are_seen(fee_bps: float, expected: set[str]) -> None:
    assert raised(eager_trader(fee_bps), updates=22) == expected
