"""The compiled step of a trunk equals the one in torch, and the ones it does not know go to torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.testing import assert_close

from tailguard.policy import PolicyConfig, RecurrentPolicy
from tailguard.policy.acting import Acting, CompiledActing, CompiledStep
from tailguard.policy.policy import Trunk
from tailguard.policy.recurrent import State

N, F = 6, 3


def trunk(widths: tuple[int, ...] = (16, 8), **settings: object) -> Trunk:
    torch.manual_seed(0)
    sizes = {} if settings.get("memory") == "none" else {"lstm_hidden_size": 12}
    body = Trunk(F, widths, PolicyConfig(**sizes, **settings))  # type: ignore[arg-type]
    for parameter in body.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return body


def head(body: Trunk) -> nn.Linear:
    return nn.Linear(body.out_features, 4)


@pytest.mark.parametrize("settings", [{}, {"n_lstm_layers": 3}, {"activation_fn": "relu"}], ids=str)
@pytest.mark.parametrize("widths", [(), (5,), (16, 8)], ids=str)
def test_compiled_steps_equal_torchs(widths: tuple[int, ...], settings: dict[str, object]) -> None:
    body = trunk(widths, **settings)
    last = head(body)
    step = body.step(last, N)
    assert isinstance(step, CompiledStep)
    zero = body.memory.initial_state(N)
    state = expected_state = State(torch.randn_like(zero.hidden), torch.randn_like(zero.cell))
    for _ in range(4):
        x = torch.randn(N, F)
        with torch.no_grad():
            features, expected_state = body.memory.step(x, expected_state)
            expected = last(body.layers(features))
        out, state = step(x, state)
        assert_close(out, expected, atol=2e-6, rtol=1e-5)
        assert_close(state.hidden, expected_state.hidden, atol=1e-6, rtol=1e-5)
        assert_close(state.cell, expected_state.cell, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("settings", [{"memory": "gru"}, {"memory": "none"}, {"activation_fn": "gelu"}], ids=str)
def test_other_trunks_step_in_torch(settings: dict[str, object]) -> None:
    body = trunk(**settings)
    last = head(body)
    step = body.step(last, N)
    assert not isinstance(step, CompiledStep)
    x, state = torch.randn(N, F), body.memory.initial_state(N)
    assert_close(step(x, state)[0], last(body.layers(body.memory.step(x, state)[0])))


def test_results_do_not_share_memory_with_the_next_step() -> None:
    body = trunk()
    last = head(body)
    step = body.step(last, N)
    first, state = step(torch.randn(N, F), body.memory.initial_state(N))
    kept = first.clone(), state.hidden.clone()
    step(torch.randn(N, F), state)
    assert torch.equal(first, kept[0])
    assert torch.equal(state.hidden, kept[1])


def test_a_state_that_was_changed_in_place_is_read_as_it_is_now() -> None:
    body = trunk()
    step = body.step(head(body), N)
    x, zero = torch.randn(N, F), body.memory.initial_state(N)
    _, after = step(x, zero)
    after.hidden.zero_()
    after.cell.zero_()
    assert torch.equal(step(x, after)[0], step(x, zero)[0])


@torch.inference_mode()
@pytest.mark.parametrize(
    ("space", "bounds"),
    [
        (spaces.Box(-1.0, 1.0, (2,), np.float32), "clip"),
        (spaces.Box(-1.0, 1.0, (2,), np.float32), "squash"),
        (spaces.Discrete(1), "clip"),
        (spaces.Discrete(2), "clip"),
        (spaces.Discrete(17), "clip"),
        (spaces.MultiDiscrete([4, 4, 4]), "clip"),
        (spaces.MultiDiscrete([2, 5]), "clip"),
        (spaces.MultiBinary(3), "clip"),
    ],
    ids=str,
)
def test_acting_without_tensors_equals_acting_with_them(space: spaces.Space[Any], bounds: Any) -> None:
    torch.manual_seed(0)
    policy = RecurrentPolicy(spaces.Box(-1.0, 1.0, (F,)), space, PolicyConfig(action_bounds=bounds, log_std_init=-0.7))
    torch.nn.init.normal_(policy.action_head.last_layer.weight)  # so that choices differ
    n_steps, action_head = 50, policy.action_head
    quick = policy.acting(n_steps, N, torch.Generator().manual_seed(1))
    assert isinstance(quick, CompiledActing)
    chance = action_head.chance((n_steps, N), torch.Generator().manual_seed(1))
    plain = Acting(policy.actor_step(N), action_head, action_head.prepared(chance))
    state = other = policy.initial_state(N)
    for t in range(n_steps):
        seen = np.random.default_rng(t).normal(size=(N, F)).astype(np.float32)
        action, state = quick.act(t, seen, state)
        expected, other = plain.act(t, seen, other)
        sampled = action_head.sample(action_head.law(plain.outputs[-1]), chance[t])
        np.testing.assert_array_equal(action, expected)
        np.testing.assert_array_equal(action, sampled.numpy())
    assert torch.equal(quick.said(), plain.said())
    assert all(torch.equal(one, two) for one, two in zip(state, other, strict=True))
