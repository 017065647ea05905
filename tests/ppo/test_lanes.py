"""The compiled gradients against torch's own, for everything they know, and what they leave to torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from torch.testing import assert_close

from tailguard import DistributionalPPO
from tailguard.errors import ConfigError
from tailguard.losses import quantile_huber
from tailguard.ppo import gradients, lanes
from tailguard.rollout import collect
from tests.agents import collected, logged, tiny_agent
from tests.environments import Identity, cartpole, pendulum, vectorized
from tests.ppo.test_update import flat_gradient

ENVS = {
    "categorical": lambda: cartpole(4, 0),
    "gaussian": lambda: pendulum(4, 0),
    "choices": lambda: vectorized(lambda: Identity(spaces.MultiDiscrete([3, 3])), 4),
}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"policy_kwargs": {"n_lstm_layers": 2, "activation_fn": "relu", "net_arch": [8, 6]}},
    {"policy_kwargs": {"net_arch": []}, "ent_coef": 0.1, "kl_penalty": {"target": 0.01, "beta": 0.5}},
    {"policy_kwargs": {"hidden_from_critics": [0]}},
    {"risk": {"mode": "episode", "weight": 0.5, "horizon": 16}},
    {"risk": {"mode": "episode", "weight": 0.5, "horizon": 16}, "policy_kwargs": {"net_arch": []}},
    {"policy_kwargs": {"lstm_hidden_size": 20}},
    {"critic": {"twin": False}},
]
NAMES = ["plain", "deep", "flat", "blinkers", "risk", "flat risk", "wide", "single"]


def moved(env: str, settings: dict[str, Any]) -> DistributionalPPO:
    """An agent that has left the policy its rollout was collected with, one sample in five of it masked."""
    agent = collected(tiny_agent(ENVS[env](), **settings))
    for parameter in agent.policy.parameters():
        parameter.data.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    agent.rollout_buffer.valid[:] = np.random.default_rng(0).random(agent.rollout_buffer.valid.shape) < 0.8
    return agent


@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
@pytest.mark.parametrize("env", ENVS)
def test_gradients_and_figures_equal_torchs(env: str, settings: dict[str, Any], micro: int | None) -> None:
    agent = moved(env, settings)
    batch = agent.sequences()
    assert list(agent.learner.compiled.known) == list(agent.learner.trunks)
    found = flat_gradient(agent, batch, micro)
    figures = figures_of(agent, batch)
    agent.learner.compiled.forget()
    expected = flat_gradient(agent, batch, micro)
    assert_close(found, expected, atol=1e-6, rtol=1e-4)
    assert float(expected.abs().max()) > 1e-3
    assert figures == pytest.approx(figures_of(agent, batch), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("size", [1, 3])
def test_a_lane_that_works_in_several_goes_has_the_same_gradient(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = moved("gaussian", {})
    batch = agent.sequences()
    expected = flat_gradient(agent, batch, None)
    monkeypatch.setattr(lanes, "MOST_SEQUENCES", size)
    assert_close(flat_gradient(agent, batch, None), expected, atol=1e-7, rtol=1e-4)


def figures_of(agent: DistributionalPPO, batch: Any) -> list[float]:
    """Everything the actor's and the critics' losses report."""
    actor, critics = agent.learner.backward(batch.whole, agent.knobs(), 1.0)
    return [
        float(torch.as_tensor(figure).detach()) for figure in (*actor, *(part for loss in critics for part in loss))
    ]


@pytest.mark.parametrize("n_threads", [2, 3, 6])
@pytest.mark.parametrize("worth_a_call", [0.0, 1e9], ids=["critics read along", "critics read at the end"])
def test_any_number_of_threads_gives_the_same_bits(
    n_threads: int, worth_a_call: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "WORTH_A_CALL", worth_a_call)
    agents = [tiny_agent(update_threads=n) for n in (1, n_threads)]
    for agent in agents:
        agent.learn(4 * 32 * 4)
    assert_same_weights(*agents)


def assert_same_weights(first: DistributionalPPO, second: DistributionalPPO) -> None:
    for one, two in zip(first.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("micro", [None, 3])
@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
@pytest.mark.parametrize("env", ["categorical", "gaussian"])
def test_bfloat16_changes_gradients_by_its_rounding_and_no_figure(
    env: str, settings: dict[str, Any], micro: int | None
) -> None:
    """The way there is the same, bit for bit; the way back has eight binary digits, and points where it pointed."""
    plain, rounded = (moved(env, {**settings, "gradient_precision": p}) for p in ("float32", "bfloat16"))
    batches = plain.sequences(), rounded.sequences()
    assert figures_of(plain, batches[0]) == figures_of(rounded, batches[1])
    exact, found = flat_gradient(plain, batches[0], None), flat_gradient(rounded, batches[1], micro)
    assert not torch.equal(exact, found)
    assert float((exact - found).norm() / exact.norm()) < 0.01


@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
@pytest.mark.parametrize("env", ["categorical", "gaussian"])
def test_critics_of_bfloat16_read_and_learn_alike_and_leave_the_actor_alone(env: str, settings: dict[str, Any]) -> None:
    """Their gradients and losses differ by rounding; the actor's, from the same advantages, do not differ at all."""
    plain = moved(env, settings)
    rounded = moved(env, {**settings, "critic": {**settings.get("critic", {}), "precision": "bfloat16"}})
    batch = plain.sequences()
    exact, found = (flat_gradient(agent, batch, None) for agent in (plain, rounded))
    actor = rounded.learner.vector.span("critics.0.").start
    assert torch.equal(exact[:actor], found[:actor])
    assert not torch.equal(exact[actor:], found[actor:])
    assert float((exact - found)[actor:].norm() / exact[actor:].norm()) < 0.02
    assert figures_of(rounded, batch) == pytest.approx(figures_of(plain, batch), rel=0.01)


ROUNDED: dict[str, dict[str, Any]] = {
    "gradients": {"gradient_precision": "bfloat16"},
    "critics": {"critic": {"precision": "bfloat16"}},
    "both": {"gradient_precision": "bfloat16", "critic": {"precision": "bfloat16"}},
}


def test_critics_of_bfloat16_learn_from_what_they_said() -> None:
    """Reading a rollout and learning from it round alike, so the first loss is that of the quantiles in the buffer."""
    agent = collected(tiny_agent(critic={"precision": "bfloat16"}))
    batch = agent.sequences()
    batch = replace(batch, target=torch.zeros(*batch.valid.shape, 1), readings={})
    _, critics = agent.learner.backward(batch.whole, agent.knobs(), 1.0)
    mean, std = agent.return_scale.snapshot
    for said, found in zip(agent.rollout_buffer.quantiles, critics, strict=True):  # (T, N, Q)
        quantiles = torch.from_numpy((said - mean) / std).float().flatten(0, 1)
        loss = quantile_huber(quantiles, torch.zeros(len(quantiles), 1), agent.config.critic.huber_kappa).mean()
        assert found.value == pytest.approx(float(loss), rel=1e-6)


@pytest.mark.parametrize("settings", ROUNDED.values(), ids=ROUNDED)
def test_bfloat16_gives_the_same_bits_on_any_number_of_threads(settings: dict[str, Any]) -> None:
    agents = [tiny_agent(update_threads=n, **settings) for n in (1, 2)]
    for agent in agents:
        agent.learn(4 * 32 * 4)
    assert_same_weights(*agents)


@pytest.mark.parametrize("settings", ROUNDED.values(), ids=ROUNDED)
def test_bfloat16_leaves_the_actors_way_there_alone_so_the_first_log_ratio_is_zero(settings: dict[str, Any]) -> None:
    agent = tiny_agent(**settings)
    agent.learn(4 * 32 * 2)
    assert logged(agent)["train/first_log_ratio_max_abs"] <= 1e-5


@pytest.mark.parametrize(
    "settings", [{"policy_kwargs": {"memory": "gru"}}, {"critic": {"kind": "categorical"}}], ids=str
)
def test_bfloat16_is_refused_where_torch_does_the_work(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="gradient_precision"):
        tiny_agent(gradient_precision="bfloat16", **settings)
    with pytest.raises(ConfigError, match=r"critic\.precision"):
        tiny_agent(**{**settings, "critic": {**settings.get("critic", {}), "precision": "bfloat16"}})


def test_critics_of_bfloat16_do_not_mind_an_actor_that_torch_differentiates() -> None:
    agent = tiny_agent(pendulum(4, 0), critic={"precision": "bfloat16"}, policy_kwargs={"action_bounds": "squash"})
    assert list(agent.learner.compiled.known) == [1, 2]
    agent.learn(4 * 32)


class StopIn(BaseCallback):
    """Breaks training off after some steps."""

    def __init__(self, n_steps: int) -> None:
        super().__init__()
        self.left = n_steps

    def _on_step(self) -> bool:
        self.left -= 1
        return self.left > 0


def test_a_rollout_that_is_broken_off_leaves_nobody_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "WORTH_A_CALL", 0.0)
    agents = [tiny_agent(update_threads=n) for n in (1, 2)]
    for agent in agents:
        agent.learn(4 * 32 * 4, callback=StopIn(32 + 27))
        agent.learn(4 * 32 * 3)
    assert_same_weights(*agents)


@pytest.mark.parametrize("n_workers", [1, 2, 6])
@pytest.mark.parametrize("trunks", [(0, 1, 2), (1, 2), (0,), (0, 1), (0, 2)])
def test_every_piece_is_begun_once(trunks: tuple[int, ...], n_workers: int) -> None:
    pieces = [tuple(piece) for piece in gradients.pieces_of(trunks, n_workers).tolist()]
    assert sorted(pieces) == [(j, i) for j in trunks for i in range(lanes.N_LANES)]


@pytest.mark.parametrize(
    ("settings", "known"),
    [
        ({"policy_kwargs": {"memory": "gru"}}, []),
        ({"policy": "MlpPolicy"}, []),
        ({"policy_kwargs": {"activation_fn": "elu"}}, []),
        ({"critic": {"kind": "categorical"}}, [0]),
        ({"critic": {"value_clip": 0.5}}, [0]),
        ({"adversary": {"epsilon": 0.1}}, [1, 2]),
    ],
    ids=str,
)
def test_what_the_loops_do_not_know_goes_to_torch(settings: dict[str, Any], known: list[int]) -> None:
    agent = tiny_agent(**settings)
    assert list(agent.learner.compiled.known) == known
    agent.learn(4 * 32)


def test_a_squashed_policy_goes_to_torch() -> None:
    agent = tiny_agent(pendulum(4, 0), policy_kwargs={"action_bounds": "squash"})
    assert list(agent.learner.compiled.known) == [1, 2]


def test_a_value_that_is_not_finite_is_not_hidden() -> None:
    agent = collected(tiny_agent())
    batch = agent.sequences()
    batch.observations[3, 2, 0] = float("nan")
    assert not torch.isfinite(flat_gradient(agent, batch, None)).all()


def test_a_hook_on_a_parameter_is_called() -> None:
    agent = collected(tiny_agent())
    batch = agent.sequences()
    span = agent.learner.vector.where(agent.policy.actor.layers[0].weight)
    agent.policy.actor.layers[0].weight.register_hook(lambda gradient: 0.0 * gradient)
    assert not flat_gradient(agent, batch, None)[span].any()
