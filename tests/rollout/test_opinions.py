"""A critic's compiled pass over a finished rollout equals the one in torch, and what it does not know goes to torch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.testing import assert_close

from tailguard.policy import Critic, CriticConfig, Layout, PolicyConfig, RecurrentPolicy, State
from tailguard.rollout import RolloutBuffer
from tailguard.rollout.opinions import CompiledListener, Opinion, TorchListener, laws_of_sequences, listener

F = 3


def policy_of(critic: dict[str, Any] | None = None, **settings: Any) -> RecurrentPolicy:
    torch.manual_seed(0)
    box = spaces.Box(-1.0, 1.0, (F,))
    sizes = {} if settings.get("memory") == "none" else {"lstm_hidden_size": 12}
    config = PolicyConfig(**{**sizes, "net_arch": [16, 9], **settings})
    policy = RecurrentPolicy(box, box, config, CriticConfig(n_quantiles=5, **(critic or {})))
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return policy


def rollout_of(n_steps: int, n_envs: int, length: int, share_of_ends: float = 0.2) -> RolloutBuffer:
    """Random steps; a share of them ends an episode, half of those by truncation, the last step's first among them."""
    rng = np.random.default_rng(0)
    buffer = RolloutBuffer(n_steps, n_envs, F, 1, length)
    ended = rng.uniform(size=(n_steps, n_envs)) < share_of_ends
    buffer.truncated[:] = ended & (rng.uniform(size=ended.shape) < 0.5)
    buffer.truncated[-1, 0] = share_of_ends > 0.0
    buffer.terminated[:] = ended & ~buffer.truncated
    buffer.starts[0] = rng.uniform(size=n_envs) < 0.3
    buffer.starts[1:] = buffer.dones[:-1]
    buffer.observations[:] = rng.normal(size=buffer.observations.shape)
    buffer.last_observations = rng.normal(size=(n_envs, F)).astype(np.float32)
    for t, n in np.argwhere(buffer.truncated):
        buffer.terminal_observations[int(t), int(n)] = rng.normal(size=F).astype(np.float32)
    return buffer


def any_state(policy: RecurrentPolicy, n: int) -> State:
    zero = policy.critic_list[0].trunk.memory.initial_state(n)
    return State(torch.randn_like(zero.hidden), torch.randn_like(zero.cell))


def opinion(critic: Critic, buffer: RolloutBuffer, state: State, starts: Any, with_features: bool) -> Opinion:
    return listener(critic, buffer, state, with_features).conclude(starts)


def torch_opinion(critic: Critic, buffer: RolloutBuffer, state: State, starts: Any) -> Opinion:
    return TorchListener(critic, buffer, state).conclude(starts)


def assert_same_opinion(found: Opinion, expected: Opinion) -> None:
    assert len(found.states) == len(expected.states)
    for state, expected_state in zip([*found.states, found.after], [*expected.states, expected.after], strict=True):
        assert_close(state.hidden, expected_state.hidden, atol=1e-5, rtol=1e-5)
        assert_close(state.cell, expected_state.cell, atol=1e-5, rtol=1e-5)
    for part, expected_part in zip(found[2:], expected[2:], strict=True):
        assert_close(part.quantiles, expected_part.quantiles, atol=1e-5, rtol=1e-5)
        assert_close(part.features, expected_part.features, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n_lstm_layers": 2},
        {"activation_fn": "relu"},
        {"hidden_from_critics": (1,)},
        {"net_arch": []},
        {"n_lstm_layers": 2, "activation_fn": "relu", "hidden_from_critics": (0, 2)},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("n_steps", "n_envs", "length"),
    [(16, 4, 8), (21, 5, 8), (1, 3, 1), (70, 71, 29), (12, 130, 12)],
    ids=["whole", "last is shorter", "one step", "many pieces and a rest", "three chunks"],
)
def test_the_compiled_pass_equals_torchs(n_steps: int, n_envs: int, length: int, settings: dict[str, Any]) -> None:
    policy, buffer = policy_of(**settings), rollout_of(n_steps, n_envs, length)
    critic, state, starts = policy.critic_list[0], any_state(policy, n_envs), buffer.dones[-1]
    assert buffer.truncated.any()
    assert critic.reader(length) is not None
    found = opinion(critic, buffer, state, starts, with_features=True)
    with torch.no_grad():
        expected = torch_opinion(critic, buffer, state, starts)
    assert_same_opinion(found, expected)


@pytest.mark.parametrize("settings", [{}, {"n_lstm_layers": 2, "activation_fn": "relu"}], ids=str)
def test_a_pass_of_bfloat16_rounds_factors_and_nothing_else(settings: dict[str, Any]) -> None:
    """Against torch with the weights of all layers but the last rounded, where only inputs are left to round."""
    policy, buffer = policy_of({"precision": "bfloat16"}, **settings), rollout_of(21, 5, 8)
    exact = policy_of(**settings)
    state, starts = any_state(policy, 5), buffer.dones[-1]
    critic, plain = policy.critic_list[0], exact.critic_list[0]
    with torch.no_grad():
        far = torch_opinion(plain, buffer, state, starts)
        for parameter in plain.trunk.parameters():
            if parameter.dim() > 1:
                parameter.copy_(parameter.bfloat16().float())
        near = torch_opinion(plain, buffer, state, starts)
    found = opinion(critic, buffer, state, starts, with_features=True)
    assert found.steps.quantiles.dtype == torch.float32
    errors = [float((found.steps.quantiles - other.steps.quantiles).norm()) for other in (near, far)]
    assert 0.0 < errors[0] < errors[1] < 0.01 * float(far.steps.quantiles.norm())


def test_a_rollout_without_an_end_is_read_too_and_features_may_be_left_out() -> None:
    policy, buffer = policy_of(), rollout_of(16, 4, 8, share_of_ends=0.0)
    critic, state, starts = policy.critic_list[0], any_state(policy, 4), buffer.dones[-1]
    assert not buffer.dones.any()
    with torch.no_grad():
        expected = torch_opinion(critic, buffer, state, starts)
    assert_same_opinion(opinion(critic, buffer, state, starts, with_features=True), expected)
    bare = opinion(critic, buffer, state, starts, with_features=False)
    assert bare.steps.features.shape == (16, 4, 0)
    assert_close(bare.steps.quantiles, expected.steps.quantiles, atol=1e-5, rtol=1e-5)


def test_a_pass_sees_the_weights_of_the_moment_and_leaves_the_state_before_alone() -> None:
    policy, buffer = policy_of(), rollout_of(16, 4, 8)
    state, starts = any_state(policy, 4), buffer.dones[-1]
    before = State(state.hidden.clone(), state.cell.clone())
    critics = policy.critic_list
    listeners = [listener(critic, buffer, state, True) for critic in critics]  # they share a thread's room
    for critic, reading in zip(critics, listeners, strict=True):
        assert_same_opinion(reading.conclude(starts), torch_opinion(critic, buffer, state, starts))
    with torch.no_grad():
        for parameter in critics[0].parameters():
            parameter.mul_(0.7)
        expected = torch_opinion(critics[0], buffer, state, starts)
    assert_same_opinion(opinion(critics[0], buffer, state, starts, with_features=True), expected)
    assert_close(state, before, atol=0.0, rtol=0.0)


def test_critics_on_two_threads_say_the_same_bits_as_one_by_one() -> None:
    policy, buffer = policy_of(n_lstm_layers=2), rollout_of(70, 71, 29)
    state, starts = any_state(policy, 71), buffer.dones[-1]
    pieces = [partial(opinion, critic, buffer, state, starts, True) for critic in policy.critic_list]
    alone = [piece() for piece in pieces]
    with ThreadPoolExecutor(2) as pool:
        together = [future.result() for future in [pool.submit(piece) for piece in pieces * 4]]
    for found, expected in zip(together, alone * 4, strict=True):
        assert torch.equal(found.steps.quantiles, expected.steps.quantiles)
        assert torch.equal(found.ends.quantiles, expected.ends.quantiles)
        assert torch.equal(found.follows.quantiles, expected.follows.quantiles)
        assert torch.equal(found.after.hidden, expected.after.hidden)


@pytest.mark.parametrize("n_steps", [64, 70])
def test_reading_along_while_the_rollout_grows_says_the_same_bits(n_steps: int) -> None:
    policy, buffer = policy_of(), rollout_of(n_steps, 5, 8)
    critic, state, starts = policy.critic_list[0], any_state(policy, 5), buffer.dones[-1]
    expected = opinion(critic, buffer, state, starts, True)
    along = listener(critic, buffer, state, True)
    assert isinstance(along, CompiledListener)
    with ThreadPoolExecutor(3) as pool:
        for position in range(8, n_steps, 8):
            pool.submit(along.follow, position)
    along.follow(24)  # which is long since read, or is now
    assert along.reading.position in range(24, n_steps, 8)
    found = along.conclude(starts)
    for part, expected_part in zip(found[2:], expected[2:], strict=True):
        assert torch.equal(part.quantiles, expected_part.quantiles)
        assert torch.equal(part.features, expected_part.features)
    assert torch.equal(found.after.hidden, expected.after.hidden)
    assert all(torch.equal(one.cell, other.cell) for one, other in zip(found.states, expected.states, strict=True))


@pytest.mark.parametrize("memory", ["lstm", "gru"])
def test_sequences_with_states_of_their_own_are_read_as_the_critic_would(memory: str) -> None:
    policy, buffer = policy_of(memory=memory), rollout_of(8, 21, 8)
    critic, state = policy.critic_list[0], any_state(policy, 21)
    observations, starts = torch.from_numpy(buffer.observations), buffer.starts
    starts[0] = False  # the state before a sequence has been forgotten already where an episode starts with it
    with torch.no_grad():
        expected = critic.head.quantiles(critic(observations, Layout(starts), state))
    assert_close(laws_of_sequences(critic, observations, starts, state), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [{"memory": "gru"}, {"memory": "none"}, {"activation_fn": "gelu"}, {"critic": {"kind": "categorical"}}],
    ids=str,
)
def test_other_critics_speak_in_torch(settings: dict[str, Any]) -> None:
    policy, buffer = policy_of(**settings), rollout_of(21, 5, 8)
    critic, state = policy.critic_list[0], any_state(policy, 5)
    assert critic.reader(8) is None
    with torch.no_grad():
        expected = torch_opinion(critic, buffer, state, buffer.dones[-1])
    assert_same_opinion(opinion(critic, buffer, state, buffer.dones[-1], with_features=True), expected)
