"""D6b: a trunk that no longer learns, or whose state is dead, is named, though its head learns on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from stable_baselines3.common.logger import Logger

from tailguard import DistributionalPPO
from tailguard.health.metrics import TRUNK_NAMES
from tests.agents import collected, logged, tiny_agent
from tests.environments import cartpole, pendulum

TWINS = ("actor", "critic1", "critic2")
SHUT, OPEN = -100.0, 100.0


def trunk_of(agent: DistributionalPPO, name: str) -> Any:
    policy = agent.policy
    return policy.actor if name == "actor" else policy.critics[int(name[-1]) - 1 if name[-1].isdigit() else 0].trunk


def set_gates(trunk: Any, **gates: float) -> None:
    """Biases of an LSTM's or a GRU's gates, so far out that no weight or observation moves them back."""
    memory = trunk.memory
    names = ("input", "forget", "candidate", "output") if memory.has_cell else ("reset", "update", "candidate")
    with torch.no_grad():
        for bias in memory.bias:
            for name, part in zip(names, bias.split(memory.out_features), strict=True):
                if name in gates:
                    part.fill_(gates[name])


def kill_lstm(trunk: Any) -> None:
    set_gates(trunk, output=SHUT)  # nothing ever comes out


def kill_gru(trunk: Any) -> None:
    set_gates(trunk, update=OPEN)  # the state is kept, and it begins with zero


def kill_relu(trunk: Any) -> None:
    with torch.no_grad():
        trunk.layers[0].bias.fill_(SHUT)  # every unit is below zero, whatever is seen


def kill_second_layer(trunk: Any) -> None:
    with torch.no_grad():
        trunk.memory.bias[1].split(trunk.memory.out_features)[3].fill_(SHUT)


def saturate(trunk: Any) -> None:
    set_gates(trunk, input=OPEN, forget=OPEN, candidate=OPEN, output=OPEN)  # the cell counts steps


def heard_from(agent: DistributionalPPO, updates: int = 8) -> set[str]:
    """Alerts about trunks and critics that begin within some updates."""
    heard: set[str] = set()
    agent.alerts.listeners.append(lambda alert, value: heard.add(alert.name))
    agent.learn(updates * agent.config.n_steps * agent.n_envs)
    return {name for name in heard if "critic" in name or "actor" in name or "lstm" in name}


KILLED: dict[str, tuple[dict[str, Any], Any, tuple[str, ...]]] = {
    "lstm": ({}, kill_lstm, ("lstm_death", "trunk_vanishing_gradients")),
    "lstm_of_two_layers": (
        {"policy_kwargs": {"n_lstm_layers": 2}},
        kill_second_layer,
        ("lstm_death", "trunk_vanishing_gradients"),
    ),
    "gru": ({"policy_kwargs": {"memory": "gru"}}, kill_gru, ("lstm_death", "trunk_vanishing_gradients")),
    "layers": (
        {"policy": "MlpPolicy", "policy_kwargs": {"activation_fn": "relu"}},
        kill_relu,
        ("trunk_vanishing_gradients",),
    ),
}


@pytest.mark.parametrize("kind", KILLED)
def test_living_trunks_raise_none(kind: str) -> None:
    assert heard_from(tiny_agent(cartpole(4, 0), **KILLED[kind][0])) == set()


@pytest.mark.parametrize("kind", KILLED)
@pytest.mark.parametrize("trunk", TWINS)
def test_a_dead_trunk_is_named_while_its_head_learns_on(trunk: str, kind: str) -> None:
    settings, kill, expected = KILLED[kind]
    agent = tiny_agent(cartpole(4, 0), **settings)
    kill(trunk_of(agent, trunk))
    assert heard_from(agent) == {f"warn/{trunk}_{name}" for name in expected}
    figures = logged(agent)
    assert figures[f"train/{trunk}_head_grad_norm"] > 1e-4
    assert figures[f"train/{trunk}_trunk_grad_share"] < 1e-5
    for other in set(TWINS) - {trunk}:
        assert figures[f"train/{other}_trunk_grad_share"] > 1e-4
        assert figures.get(f"lstm/{other}_dead_share", 0.0) < 0.5
    if "lstm_death" in expected:
        assert figures[f"lstm/{trunk}_dead_share"] == 1.0
        assert 0.0 < figures["lstm/dead_share"] < 0.9  # of all trunks together: too few for their alert


@pytest.mark.parametrize("trunk", TWINS)
def test_a_saturated_trunk_is_named(trunk: str) -> None:
    agent = tiny_agent(pendulum(4, 0))
    saturate(trunk_of(agent, trunk))
    assert f"warn/{trunk}_lstm_saturation" in (heard := heard_from(agent, 6))
    assert not [name for name in heard if not name.startswith(f"warn/{trunk}_")]
    assert logged(agent)[f"lstm/{trunk}_cell_max_abs"] == logged(agent)["lstm/cell_max_abs"] > 30.0


def test_a_single_critic_has_no_number() -> None:
    agent = tiny_agent(critic={"twin": False})
    kill_lstm(trunk_of(agent, "critic"))
    assert heard_from(agent) == {"warn/critic_lstm_death", "warn/critic_trunk_vanishing_gradients"}


def test_a_memory_that_holds_nothing_anywhere_is_said_of_all_and_of_each() -> None:
    agent = tiny_agent()
    for trunk in TWINS:
        kill_lstm(trunk_of(agent, trunk))
    heard = heard_from(agent)
    assert {"warn/lstm_death", *(f"warn/{trunk}_lstm_death" for trunk in TWINS)} <= heard


def test_a_trunk_that_was_frozen_on_purpose_is_not_judged() -> None:
    agent = collected(tiny_agent())
    agent.policy.critics[0].trunk.requires_grad_(False)
    agent.train()
    figures = logged(agent)
    assert not [name for name in figures if name.startswith("train/critic1_trunk")]
    assert figures["train/critic1_head_grad_norm"] > 0.0
    assert figures["train/critic2_trunk_grad_norm"] > 0.0


@pytest.mark.parametrize("optimizer", ["adam", "adaptive_upgd"])
@pytest.mark.parametrize("hooked", [False, True], ids=["as_it_runs", "by_autograd"])
def test_norms_of_trunks_and_heads_are_those_of_the_raw_gradient(optimizer: str, hooked: bool) -> None:
    def one_step() -> DistributionalPPO:
        return collected(
            tiny_agent(n_epochs=1, batch_size=128, ev_reserve=0.0, optimizer=optimizer, max_grad_norm=1e-3)
        )

    reference, agent = one_step(), one_step()
    squares: dict[str, float] = {}

    def listen(model: DistributionalPPO, into: dict[str, float]) -> None:
        for name, parameter in model.policy.named_parameters():
            place = name.split(".")
            owner = f"critic{int(place[1]) + 1}" if place[0] == "critics" else "actor"
            part = f"{owner}_head" if "head" in name else f"{owner}_trunk"
            parameter.register_hook(
                lambda g, part=part: into.__setitem__(part, into.get(part, 0.0) + float(g.double().square().sum()))
            )

    listen(reference, squares)
    reference.train()
    if hooked:
        listen(agent, {})
    agent.train()
    assert set(squares) == {f"{trunk}_{part}" for trunk in TWINS for part in ("trunk", "head")}
    for part, square in squares.items():
        assert logged(agent)[f"train/{part}_grad_norm"] == pytest.approx(square**0.5, rel=1e-4), part


def test_nothing_is_said_of_an_update_without_a_step() -> None:
    agent = collected(tiny_agent())
    agent.train()
    agent.rollout_buffer.valid[:] = False
    agent.set_logger(Logger(None, []))
    agent.train()
    assert not [name for name in logged(agent) if "_trunk_grad" in name or "_head_grad" in name]
    assert set(TRUNK_NAMES) == {*TWINS, "critic"}
