"""B2, B4: memory over whole sequences equals memory step by step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from tailguard.policy.recurrent import GatedMemory, Layout, Memory, RecurrentInit, State, make_memory
from tests.agents import tiny_agent

L, B, F, H = 12, 5, 3, 8
KINDS = [("lstm", 1), ("lstm", 2), ("gru", 1), ("gru", 2), ("none", 0)]


@pytest.fixture(params=KINDS, ids=lambda p: f"{p[0]}{p[1]}")
def memory(request: pytest.FixtureRequest) -> Memory:
    torch.manual_seed(0)
    kind, layers = request.param
    memory = make_memory(kind, F, H, max(layers, 1))
    for bias in getattr(memory, "bias", []):
        torch.nn.init.normal_(bias)
    return memory


def random_state(memory: Memory, n: int) -> State:
    zero = memory.initial_state(n)
    return State(torch.randn_like(zero.hidden), torch.randn_like(zero.cell))


def step_by_step(memory: Memory, x: torch.Tensor, starts: np.ndarray, state: State) -> tuple[torch.Tensor, State]:
    features = []
    for t in range(len(x)):
        state = state.keep(torch.from_numpy(~starts[t]).float())
        out, state = memory.step(x[t], state)
        features.append(out)
    return torch.stack(features), state


def random_starts(seed: int, share: float = 0.3) -> np.ndarray:
    return np.random.default_rng(seed).random((L, B)) < share


@pytest.mark.parametrize("seed", range(3))
def test_a_fused_call_equals_single_steps_across_episode_starts(memory: Memory, seed: int) -> None:
    torch.manual_seed(seed)
    x, starts = torch.randn(L, B, F), random_starts(seed)
    state = random_state(memory, B).keep(torch.from_numpy(~starts[0]).float())
    expected, last = step_by_step(memory, x, starts, state)
    unrolled = memory.unroll(x, Layout(starts), state)
    assert_close(unrolled.features, expected, atol=1e-6, rtol=1e-5)
    assert_close(unrolled.state.hidden, last.hidden, atol=1e-6, rtol=1e-5)
    assert_close(unrolled.state.cell, last.cell, atol=1e-6, rtol=1e-5)


def test_gradients_of_a_fused_call_equal_those_of_single_steps(memory: Memory) -> None:
    if not list(memory.parameters()):
        pytest.skip("no memory, no parameters")
    x, starts = torch.randn(L, B, F), random_starts(1)
    state = random_state(memory, B).keep(torch.from_numpy(~starts[0]).float())
    weight = torch.randn(L, B, H)
    fused = torch.autograd.grad(
        (memory.unroll(x, Layout(starts), state).features * weight).sum(), list(memory.parameters())
    )
    single = torch.autograd.grad((step_by_step(memory, x, starts, state)[0] * weight).sum(), list(memory.parameters()))
    for ours, theirs in zip(fused, single, strict=True):
        assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_a_sequence_across_an_episode_start_equals_its_two_halves_run_apart(memory: Memory) -> None:
    x, starts = torch.randn(L, 1, F), np.zeros((L, 1), np.bool_)
    starts[7] = True
    none = np.zeros((1, 1), np.bool_)
    state = random_state(memory, 1)
    whole = memory.unroll(x, Layout(starts), state).features
    first = memory.unroll(x[:7], Layout(np.repeat(none, 7, 0)), state).features
    second = memory.unroll(x[7:], Layout(np.repeat(none, 5, 0)), memory.initial_state(1)).features
    assert_close(whole, torch.cat([first, second]), atol=1e-6, rtol=1e-5)


def test_a_batch_with_unequal_room_for_resets_equals_its_sequences_one_by_one(memory: Memory) -> None:
    x, starts = torch.randn(L, B, F), random_starts(2)
    starts[:, 0] = False  # one sequence is padded by the resets of the others
    state = random_state(memory, B).keep(torch.from_numpy(~starts[0]).float())
    together = memory.unroll(x, Layout(starts), state)
    for b in range(B):
        alone = memory.unroll(x[:, b : b + 1], Layout(starts[:, b : b + 1]), state.select([b]))
        assert_close(together.features[:, b : b + 1], alone.features, atol=1e-6, rtol=1e-5)
        assert_close(together.state.cell[:, b : b + 1], alone.state.cell, atol=1e-6, rtol=1e-5)


def test_no_environment_sees_anothers_input_or_state(memory: Memory) -> None:
    x, starts = torch.randn(L, B, F), random_starts(3)
    state = random_state(memory, B).keep(torch.from_numpy(~starts[0]).float())
    before = memory.unroll(x, Layout(starts), state).features
    x[:, 2] += 10.0
    state.hidden[:, 2] += 1.0
    after = memory.unroll(x, Layout(starts), state).features
    others = [b for b in range(B) if b != 2]
    assert_close(before[:, others], after[:, others], atol=0, rtol=0)


def test_a_reset_leaves_exactly_zero_and_touches_only_the_environments_that_ended() -> None:
    memory = make_memory("lstm", F, H, 2)
    state = random_state(memory, 3)
    kept = state.keep(torch.tensor([1.0, 0.0, 1.0]))
    assert (kept.hidden[:, 1] == 0).all()
    assert (kept.cell[:, 1] == 0).all()
    assert_close(kept.hidden[:, [0, 2]], state.hidden[:, [0, 2]], atol=0, rtol=0)
    # the same through the control row of a fused call: what follows a start cannot depend on what came before
    x, starts = torch.randn(4, 1, F), np.array([[False], [False], [True], [False]])
    one = memory.unroll(x, Layout(starts), random_state(memory, 1)).features
    two = memory.unroll(x, Layout(starts), random_state(memory, 1)).features
    assert_close(one[2:], two[2:], atol=0, rtol=0)
    assert not torch.equal(one[:2], two[:2])


def test_an_extra_observation_sees_the_state_after_its_step_and_leaves_no_trace(memory: Memory) -> None:
    x, starts = torch.randn(L, B, F), np.zeros((L, B), np.bool_)
    starts[5, 1], starts[9, 3] = True, True
    extra = np.zeros((L, B), np.bool_)
    extra[4, 1], extra[8, 3], extra[L - 1, 0] = True, True, True  # before a start, and at the very end
    observed = torch.randn(3, F)
    state = random_state(memory, B)
    unrolled = memory.unroll(x, Layout(starts, extra), state, observed)
    plain = memory.unroll(x, Layout(starts), state)
    assert_close(unrolled.features, plain.features, atol=1e-6, rtol=1e-5)
    for row, (t, b) in enumerate(np.argwhere(extra)):
        _, at = step_by_step(memory, x[: t + 1, b : b + 1], starts[: t + 1, b : b + 1], state.select([b]))
        expected, _ = memory.step(observed[row : row + 1], at)
        assert_close(unrolled.extra_features[row : row + 1], expected, atol=1e-6, rtol=1e-5)


def started(kind: str, start: RecurrentInit, size: int = 64) -> GatedMemory:
    torch.manual_seed(0)
    memory = make_memory(kind, F, size, 2, start)
    assert isinstance(memory, GatedMemory)
    return memory


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_half_of_a_mixed_memory_remembers_for_2_to_100_steps_and_the_rest_starts_uniform(kind: str) -> None:
    mixed, uniform = started(kind, "mixed"), started(kind, "uniform")
    for ours, torchs in zip(mixed.parameters(), uniform.parameters(), strict=True):
        remembering = torch.zeros_like(ours, dtype=torch.bool)
        if ours.ndim == 1:
            remembering[64:128:2] = True
            times = 1.0 / (1.0 - torch.sigmoid(ours.detach()[remembering]))
            assert_close(times[[0, -1]], torch.tensor([2.0, 100.0]), rtol=1e-4, atol=0.0)
            ratios = times[1:] / times[:-1]
            assert_close(ratios, ratios[:1].expand(31), rtol=1e-3, atol=0.0)
        assert torch.equal(ours[~remembering], torchs[~remembering])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_uniform_start_is_that_of_torchs_own_module_with_both_biases_in_one(kind: str) -> None:
    torch.manual_seed(1)
    reference = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[kind](F, 64, 2)
    memory = started(kind, "uniform")
    for layer in range(2):
        biases = getattr(reference, f"bias_ih_l{layer}") + getattr(reference, f"bias_hh_l{layer}")
        pairs = [(memory.input_weight[layer], getattr(reference, f"weight_ih_l{layer}")), (memory.bias[layer], biases)]
        for ours, theirs in [*pairs, (memory.hidden_weight[layer], getattr(reference, f"weight_hh_l{layer}"))]:
            assert float(ours.std()) == pytest.approx(float(theirs.std()), rel=0.15)
            assert float(ours.abs().max()) == pytest.approx(float(theirs.abs().max()), rel=0.15)
            assert abs(float(ours.mean())) < 0.02


def test_an_orthogonal_start_has_orthogonal_gates_and_an_lstm_that_remembers() -> None:
    memory = started("lstm", "orthogonal")
    for gate in memory.hidden_weight[0].split(64):
        assert_close(gate @ gate.T, torch.eye(64), atol=1e-5, rtol=0.0)
    wanted = torch.zeros(256)
    wanted[64:128] = 1.0
    assert torch.equal(memory.bias[0].detach(), wanted)


@pytest.mark.parametrize("start", ["orthogonal", "uniform", "mixed"])
def test_the_start_of_the_memory_is_a_setting_of_actor_and_critics(start: RecurrentInit) -> None:
    agent = tiny_agent(policy_kwargs={"recurrent_init": start})
    for rnn in agent.policy.memories:
        assert isinstance(rnn, GatedMemory)
        matrix = rnn.hidden_weight[0].detach()[:8]
        assert torch.allclose(matrix @ matrix.T, torch.eye(8), atol=1e-5) == (start == "orthogonal")
        slowest = float(torch.sigmoid(rnn.bias[0].detach()[8:16]).max())
        assert (slowest > 0.98) == (start == "mixed")
