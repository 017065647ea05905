"""A rollout as a batch of whole sequences: cut every L steps, the stored state at the start of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.normalization import Affine
from tailguard.policy import Layout, State
from tailguard.rollout.buffer import Floats, RolloutBuffer

Ints = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class SequenceBatch:
    """B whole sequences, time first."""

    observations: Tensor  # (L, B, F)
    actions: Tensor  # (L, B, A)
    log_probs: Tensor  # (L, B) of the policy that acted
    advantages: Tensor  # (L, B) normalized
    returns: Tensor  # (L, B) lambda-returns, raw units
    target: Tensor  # (L, B, K) samples of the return in normalized units
    old_quantiles: Tensor  # (C, L, B, Q) per critic, normalized units; Q = 0 where nobody asks
    risk: Tensor  # (L, B, 3) period features and target of the risk value; (L, B, 0) without one
    valid: Tensor  # (L, B)
    starts: NDArray[np.bool_]  # (L, B)
    actor_state: State
    critic_states: tuple[State, ...]

    @property
    def n_sequences(self) -> int:
        return int(self.valid.shape[1])

    def layout(self) -> Layout:
        """Where episode starts make room for reset rows."""
        return Layout(self.starts)

    def select(self, chosen: Ints) -> SequenceBatch:
        """A copy of some of the sequences."""
        index = torch.from_numpy(np.asarray(chosen, dtype=np.int64))
        return SequenceBatch(
            observations=self.observations.index_select(1, index),
            actions=self.actions.index_select(1, index),
            log_probs=self.log_probs.index_select(1, index),
            advantages=self.advantages.index_select(1, index),
            returns=self.returns.index_select(1, index),
            target=self.target.index_select(1, index),
            old_quantiles=self.old_quantiles.index_select(2, index),
            risk=self.risk.index_select(1, index),
            valid=self.valid.index_select(1, index),
            starts=np.ascontiguousarray(self.starts[:, chosen]),
            actor_state=self.actor_state.select(index),
            critic_states=tuple(state.select(index) for state in self.critic_states),
        )

    def without_invalid(self) -> SequenceBatch:
        """Zeros where samples are not valid. A mask alone does not keep NaN out: its gradient is zero times NaN.

        Memory still sees the observations of invalid steps, as it did when acting.
        """
        valid = self.valid
        if bool(valid.all()):
            return self

        def only(values: Tensor, mask: Tensor) -> Tensor:
            return torch.where(mask, values, values.new_zeros(()))

        deep = valid.unsqueeze(-1)
        return replace(
            self,
            observations=only(self.observations, deep | self.observations.isfinite()),
            actions=only(self.actions, deep),
            log_probs=only(self.log_probs, valid),
            advantages=only(self.advantages, valid),
            returns=only(self.returns, valid),
            target=only(self.target, deep),
            old_quantiles=only(self.old_quantiles, deep),
            risk=only(self.risk, deep),
        )


def sequences_of(
    buffer: RolloutBuffer,
    advantages: Floats,
    target: Floats,
    scale: Affine,
    risk: Floats | None = None,
    with_old_quantiles: bool = True,
) -> SequenceBatch:
    """All sequences of a rollout; target and old quantiles in the units of `scale`, which is fixed for the update.

    risk: (T, N, 3) what the risk value learns from, in its own units; None where there is none
    """
    lesson = np.zeros((buffer.n_steps, buffer.n_envs, 0)) if risk is None else risk
    length = buffer.sequence_length
    said = buffer.quantiles if with_old_quantiles else buffer.quantiles[..., :0]
    old = ((said - scale.mean) / scale.std).astype(np.float32)
    return SequenceBatch(
        observations=cut(buffer.observations, length),
        actions=cut(buffer.actions, length),
        log_probs=cut(buffer.log_probs, length),
        advantages=cut(advantages.astype(np.float32), length),
        returns=cut(buffer.returns.astype(np.float32), length),
        target=cut(((target - scale.mean) / scale.std).astype(np.float32), length),
        old_quantiles=torch.stack([cut(critic, length) for critic in old]),
        risk=cut(lesson.astype(np.float32), length),
        valid=cut(buffer.valid, length),
        starts=cut(buffer.starts, length).numpy(),
        actor_state=join_states(buffer.actor_states),
        critic_states=tuple(join_states([states[c] for states in buffer.critic_states]) for c in range(len(old))),
    )


def cut(array: NDArray[Any], length: int) -> Tensor:
    """(T, N, ...) to (L, S, ...) with S = ceil(T / L) * N sequences, zero-padded in time where T is not whole."""
    n_steps, n_envs = array.shape[:2]
    n_chunks = -(-n_steps // length)
    missing = n_chunks * length - n_steps
    if missing:
        array = np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
    chunks = array.reshape(n_chunks, length, n_envs, *array.shape[2:]).swapaxes(0, 1)
    return torch.from_numpy(np.ascontiguousarray(chunks).reshape(length, n_chunks * n_envs, *array.shape[2:]))


def join_states(states: list[State]) -> State:
    """States of consecutive sequences, each (layers, N, H), as one (layers, S, H)."""
    return State(torch.cat([s.hidden for s in states], 1), torch.cat([s.cell for s in states], 1))


def reserve(n_sequences: int, share: float, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Sequences to train on and sequences that never enter a gradient; none are set aside when there are few."""
    n_reserved = round(n_sequences * share)
    if share > 0.0 and n_reserved == 0 and n_sequences >= 8:
        n_reserved = 1
    order = rng.permutation(n_sequences)
    return order[n_reserved:], order[:n_reserved]


def minibatches(chosen: Ints, per_batch: int, rng: np.random.Generator) -> Iterator[Ints]:
    """Shuffle sequences into batches of nearly equal size, as close to per_batch as whole batches allow."""
    n_batches = max(round(len(chosen) / per_batch), 1)
    yield from np.array_split(rng.permutation(chosen), n_batches)
