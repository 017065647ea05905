"""What the critics predict at the steps of a finished rollout, in raw reward units (docs/algorithm.md, Algorithm 1)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.kernels.networks import Evaluation as NativeEvaluation
from tailguard.kernels.networks import Trunk, evaluate
from tailguard.normalization import Affine
from tailguard.policy import Critic, CriticOutput, Layout, RecurrentPolicy, State
from tailguard.policy.native import arrays_of, loaded_trunk
from tailguard.rollout.buffer import Floats, RolloutBuffer
from tailguard.rollout.collect import RolloutState

Bools = NDArray[np.bool_]


class Evaluation(NamedTuple):
    """One critic's predictions on a rollout of T steps of N environments, E of whose episodes were truncated."""

    steps: CriticOutput  # (T, N, *)
    terminal: CriticOutput  # (E, *) at truncated episodes' last observations, in the order of np.nonzero(truncated)
    following: CriticOutput  # (N, *) at the observations after the last step
    states: list[State]  # before each sequence
    after: State  # after the last step


@torch.inference_mode()
def evaluate_rollout(
    policy: RecurrentPolicy, buffer: RolloutBuffer, state: RolloutState, scale: Affine, n_threads: int
) -> None:
    """Fill the buffer's quantiles, values and critic states, all decoded with one scale; moves the critics' states on.

    The quantiles of two critics are aggregated in one way everywhere (`RecurrentPolicy.aggregate`).
    """
    if all(critic.why_torch() is None for critic in policy.critic_list):
        evaluations = evaluate_native(policy, buffer, state, n_threads)
    else:
        pairs = zip(policy.critic_list, state.critic_states, strict=True)
        evaluations = [evaluate_torch(critic, buffer, before, state.starts) for critic, before in pairs]
    buffer.critic_states = [list(states) for states in zip(*(found.states for found in evaluations), strict=True)]
    state.critic_states = [found.after for found in evaluations]
    if policy.risk_value is not None:
        first = evaluations[0]
        buffer.features = torch.cat([first.steps.features, first.following.features.unsqueeze(0)])
        buffer.terminal_features = first.terminal.features
    steps, terminal, following = (
        [part.quantiles for part in parts] for parts in list(zip(*evaluations, strict=True))[:3]
    )
    aggregated = torch.cat([policy.aggregate(steps), policy.aggregate(following).unsqueeze(0)])
    buffer.quantiles = decode(torch.stack(steps), scale)
    buffer.law = decode(aggregated, scale)
    terminal_law = decode(policy.aggregate(terminal), scale)
    where = np.argwhere(buffer.truncated)
    buffer.terminal_law = {(int(t), int(n)): law for (t, n), law in zip(where, terminal_law, strict=True)}
    masses = policy.masses.numpy(force=True).astype(np.float64)
    buffer.values = buffer.law @ masses
    buffer.terminal_values = np.zeros_like(buffer.rewards)
    if len(where):
        buffer.terminal_values[where[:, 0], where[:, 1]] = terminal_law @ masses


def evaluate_torch(critic: Critic, buffer: RolloutBuffer, state: State, next_starts: Bools) -> Evaluation:
    """One critic on a finished rollout, sequence by sequence; `next_starts` (N,): what follows is another episode."""
    device = critic.head.last_layer.weight.device
    states: list[State] = []
    steps: list[CriticOutput] = []
    terminal: list[CriticOutput] = []
    for first in range(0, buffer.n_steps, buffer.sequence_length):
        rows = slice(first, min(first + buffer.sequence_length, buffer.n_steps))
        layout = Layout(buffer.starts[rows], buffer.truncated[rows])
        state = state.keep(torch.from_numpy(~layout.starts[0]).float().to(device))
        states.append(state)
        observations = torch.from_numpy(buffer.observations[rows]).to(device)
        extra = torch.from_numpy(terminal_observations(buffer, rows)).to(device)
        of_steps, of_terminal, state = critic.evaluate(observations, layout, state, extra)
        steps.append(of_steps)
        terminal.append(of_terminal)
    fresh = state.keep(torch.from_numpy(~next_starts).float().to(device))
    following, _ = critic.step(torch.from_numpy(buffer.last_observations).to(device), fresh)
    return Evaluation(joined(steps), joined(terminal), following, states, state)


def evaluate_native(
    policy: RecurrentPolicy, buffer: RolloutBuffer, state: RolloutState, n_threads: int
) -> list[Evaluation]:
    """All critics on a finished rollout by the native core; the same predictions as `evaluate_torch`."""
    critics = policy.critic_list
    trunks = [loaded_trunk(critic.trunk, critic.head.last_layer) for critic in critics]
    states = [before.copy() for before in state.critic_states]
    hidden, cell = ([arrays_of(part)[i] for part in states] for i in (0, 1))
    seen = [critic.mask(torch.from_numpy(buffer.observations)).numpy() for critic in critics]
    where = np.ascontiguousarray(np.argwhere(buffer.truncated))
    features = [policy.risk_value is not None and c == 0 for c in range(len(critics))]
    found = evaluate(trunks, seen, buffer.starts, hidden, cell, buffer.sequence_length, where, n_threads, features)
    last = terminal_observations(buffer, slice(0, buffer.n_steps))
    evaluations = []
    for critic, trunk, evaluated, after in zip(critics, trunks, found, states, strict=True):
        ended = np.zeros(len(last), np.bool_)
        terminal = step_once(critic, trunk, last, ended, evaluated.after_hidden, evaluated.after_cell)
        copies = (part.copy() for part in arrays_of(after))
        following = step_once(critic, trunk, buffer.last_observations, state.starts, *copies)
        pairs = zip(evaluated.before_hidden, evaluated.before_cell, strict=True)
        before = [State(*map(torch.from_numpy, pair)) for pair in pairs]
        evaluations.append(Evaluation(output_of(evaluated), terminal, following, before, after))
    return evaluations


def step_once(critic: Critic, trunk: Trunk, obs: Floats, starts: Bools, hidden: Floats, cell: Floats) -> CriticOutput:
    """Predictions at single observations (n, F) by the native core, after states (layers, n, H) that it may overwrite;
    `starts` (n,): the observation begins an episode."""
    seen, nowhere = critic.mask(torch.from_numpy(obs)).numpy()[None], np.zeros((0, 2), np.int64)
    (found,) = evaluate([trunk], [seen], starts[None], [hidden], [cell], 1, nowhere, features=[True])
    output = output_of(found)
    return CriticOutput(output.quantiles[0], output.features[0])


def output_of(found: NativeEvaluation) -> CriticOutput:
    """What the native core found at some steps, as tensors."""
    features = np.zeros((*found.output.shape[:2], 0), np.float32) if found.features is None else found.features
    return CriticOutput(torch.from_numpy(found.output), torch.from_numpy(features))


@torch.inference_mode()
def sequence_quantiles(critic: Critic, observations: Tensor, starts: Bools, state: State) -> Tensor:
    """(L, B, Q) quantiles that a critic predicts on whole sequences (L, B, F), in normalized units."""
    if critic.why_torch() is not None:
        return critic.head.quantiles(critic(observations, Layout(starts), state))
    trunk, before = loaded_trunk(critic.trunk, critic.head.last_layer), state.copy()
    hidden, cell = arrays_of(before)
    seen, nowhere = critic.mask(observations).contiguous().numpy(), np.zeros((0, 2), np.int64)
    (found,) = evaluate([trunk], [seen], starts, [hidden], [cell], len(starts), nowhere)
    return torch.from_numpy(found.output)


def decode(normalized: Tensor, scale: Affine) -> Floats:
    """Normalized units to raw reward units, in place: the quantiles of a long rollout are large."""
    raw: Floats = normalized.numpy(force=True)
    raw *= scale.std
    raw += scale.mean
    return raw


def joined(parts: list[CriticOutput]) -> CriticOutput:
    """Predictions of consecutive sequences as one."""
    return CriticOutput(torch.cat([part.quantiles for part in parts]), torch.cat([part.features for part in parts]))


def terminal_observations(buffer: RolloutBuffer, rows: slice) -> Floats:
    """(E, F) last observations of the episodes truncated in some steps, in the order of np.nonzero."""
    found = [buffer.terminal_observations[rows.start + t, n] for t, n in np.argwhere(buffer.truncated[rows])]
    return np.stack(found) if found else np.zeros((0, buffer.observations.shape[-1]), np.float32)
