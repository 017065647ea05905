"""A trunk and the last layer of its head over a whole rollout in one compiled call, without gradient.

The steps go through the loops in pieces, so that the room they need stays in the cache however long a rollout is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tailguard.loops import compiled
from tailguard.policy.blas import Array, blas
from tailguard.policy.lstm_kernel import ZERO
from tailguard.policy.recurrent import LSTM, State
from tailguard.policy.rooms import Rooms
from tailguard.policy.trunk_kernel import Seen, features_of, last_out, packed_weights, trunk_forward, weights_of

MOST_SEQUENCES = 64  # at a time
MOST_ROWS = 512  # steps of sequences at a time
ROOMS = Rooms()


class Passage(NamedTuple):
    """T steps of N environments, and the state before them."""

    x: Tensor  # (T, N, F)
    starts: Array  # (T, N) bool: the step begins an episode
    state: State


class Aside(NamedTuple):
    """One more observation after some of the steps, which changes no state: the last of a truncated episode."""

    x: Tensor  # (E, F)
    where: Array  # (E, 2) step and environment, ascending


class Next(NamedTuple):
    """The observations after the last step."""

    x: Tensor  # (N, F)
    starts: Array  # (N,)


class Said(NamedTuple):
    """Of some observations (..., F)."""

    output: Tensor  # (..., W) of the last linear layer
    features: Tensor  # (..., H) what it read; H = 0 where nobody asked


class Read(NamedTuple):
    """What a trunk says of a passage."""

    steps: Said  # (T, N, *)
    aside: Said  # (E, *)
    next: Said  # (N, *)
    states: list[State]  # before each sequence
    after: State  # after the last step


class Found(NamedTuple):
    """Where the loops write what they find in T steps of N environments."""

    output: Array  # (T, N, W)
    features: Array  # (T, N, H) or (T, N, 0)
    hidden: Array  # (sequences, layers, N, H) before each sequence
    cell: Array


class TrunkReader:
    """Reads sequences of one length, of which the last may be shorter, with the weights of the moment it is made."""

    def __init__(self, memory: LSTM, linear: Sequence[nn.Linear], activation: str, sequence_length: int) -> None:
        self.shape, self.flat = weights_of(memory, linear, activation)
        self.packed = packed_weights(self.shape, self.flat)
        self.sequence_length, self.n_features, self.n_outputs = sequence_length, *linear[-1].weight.shape[::-1]

    def read(self, passage: Passage, aside: Aside, following: Next, with_features: bool) -> Read:
        """All of it in one compiled call; features are left out where nobody asks."""
        n_features = self.n_features if with_features else 0
        seen = seen_of(passage)
        ends = seen_of(Passage(aside.x[None], np.zeros((1, len(aside.x)), np.bool_), self.room_for_state(len(aside.x))))
        after = seen_of(Passage(following.x[None], following.starts[None], self.room_for_state(len(following.x))))
        found, found_aside, found_next = (self.findings(part, n_features) for part in (seen, ends, after))
        length, size = piece_sizes(self.sequence_length, seen.starts.shape[1])
        rooms = ROOMS.of(self.shape, length, size), ROOMS.of(self.shape, 1, size)
        trunk = blas(), self.shape, self.flat, self.packed, *rooms, self.sequence_length
        where = np.ascontiguousarray(aside.where)  # one layout, one compilation
        rollout_kernel(trunk, seen, found, where, ends, found_aside, after, found_next)
        states = [state_of(*before) for before in zip(found.hidden, found.cell, strict=True)]
        return Read(
            said(found), said_once(found_aside), said_once(found_next), states, state_of(seen.hidden, seen.cell)
        )

    def room_for_state(self, n: int) -> State:
        """Of n environments, to be filled."""
        extents = self.shape.n_layers, n, self.shape.n_units
        return State(torch.empty(extents), torch.empty(extents))

    def findings(self, seen: Seen, n_features: int) -> Found:
        n_steps, n_envs = seen.starts.shape
        states = -(-n_steps // self.sequence_length), *seen.hidden.shape
        extents = (n_steps, n_envs, self.n_outputs), (n_steps, n_envs, n_features), states, states
        return Found(*(np.empty(extent, np.float32) for extent in extents))


def seen_of(passage: Passage) -> Seen:
    """The same as arrays; the state is a copy that the loops carry along."""
    hidden, cell = (np.array(part.numpy(), order="C") for part in passage.state)
    x, starts = passage.x.contiguous().numpy(), np.ascontiguousarray(passage.starts)
    return Seen(x, starts, hidden, cell, np.arange(starts.shape[1]))


def said(found: Found) -> Said:
    return Said(torch.from_numpy(found.output), torch.from_numpy(found.features))


def said_once(found: Found) -> Said:
    """Of a passage of one step, without its first axis."""
    return Said(torch.from_numpy(found.output[0]), torch.from_numpy(found.features[0]))


def state_of(hidden: Array, cell: Array) -> State:
    return State(torch.from_numpy(hidden), torch.from_numpy(cell))


def piece_sizes(sequence_length: int, n_envs: int) -> tuple[int, int]:
    """Steps and environments at a time: shares that are nearly equal, so that little of the room stays empty."""
    n_chunks = max(-(-n_envs // MOST_SEQUENCES), 1)
    size = max(-(-n_envs // n_chunks), 1)
    n_pieces = -(-sequence_length // max(MOST_ROWS // size, 1))
    return sequence_length // n_pieces, size


@compiled
def rollout_kernel(trunk, seen, found, where, ends, found_ends, after, found_after):  # type: ignore[no-untyped-def]
    """All steps, the observations aside from the states after `where`, and those after the last step."""
    parts, results = (seen, ends, after), (found, found_ends, found_after)
    for i in range(3):  # one call in the text, so that the loops are compiled once
        read_kernel(trunk, parts[i], results[i], where if i == 0 else where[:0], ends)
        if i == 0 and after.starts.size:
            after.hidden[:] = seen.hidden
            after.cell[:] = seen.cell


@compiled
def read_kernel(trunk, seen, found, where, ends):  # type: ignore[no-untyped-def]
    """Fill `found` and the states of `ends`; seen.hidden and seen.cell become the state after the last step."""
    whole, single, sequence_length = trunk[4:]
    n_steps, n_envs = seen.starts.shape
    length, size = whole.kept.shape
    for low in range(0, n_envs, size):
        high = min(low + size, n_envs)
        for begin in range(0, n_steps, sequence_length):
            end = min(begin + sequence_length, n_steps)
            forget_where_episodes_start(seen, begin, low, high)
            found.hidden[begin // sequence_length, :, low:high] = seen.hidden[:, low:high]
            found.cell[begin // sequence_length, :, low:high] = seen.cell[:, low:high]
            first = begin
            while first < end:
                room = whole if first + length <= end else single
                read_piece(trunk[:4], room, seen, first, low, high, found)
                keep_ended(room, first, low, high, where, ends)
                first += len(room.kept)


@compiled
def forget_where_episodes_start(seen, t, low, high):  # type: ignore[no-untyped-def]
    """Zero the states of environments low .. high whose episode starts with step t."""
    for n in range(low, high):
        if seen.starts[t, n]:
            seen.hidden[:, n] = ZERO
            seen.cell[:, n] = ZERO


@compiled
def read_piece(weights, room, seen, first, low, high, found):  # type: ignore[no-untyped-def]
    """As many steps as the room holds, from `first` on, of environments low .. high."""
    blas, shape, flat, packed = weights
    n_steps, size = room.kept.shape
    last, n = first + n_steps, high - low
    forget_where_episodes_start(seen, first, low, high)
    piece = Seen(seen.x[first:last], seen.starts[first:last], seen.hidden, seen.cell, seen.chosen)
    trunk_forward(blas, shape, flat, packed, room, piece, low, high)
    copy_rows(last_out(shape, room, room.outs), size, found.output[first:last], low, high)
    if found.features.size:
        copy_rows(features_of(shape, room), size, found.features[first:last], low, high)
    seen.hidden[:, low:high] = room.hidden[:, n_steps - 1, :n]
    seen.cell[:, low:high] = room.cells[:, n_steps - 1, :n]


@compiled
def copy_rows(rows, size, result, low, high):  # type: ignore[no-untyped-def]
    """rows: (L b, W) of the room;  result: (L, N, W)."""
    for t in range(len(result)):
        result[t, low:high] = rows[t * size : t * size + high - low]


@compiled
def keep_ended(room, first, low, high, where, ends):  # type: ignore[no-untyped-def]
    """The states after those of `where` (E, 2) that lie in the room."""
    begin, end = np.searchsorted(where[:, 0], first), np.searchsorted(where[:, 0], first + len(room.kept))
    for e in range(begin, end):
        t, n = where[e]
        if low <= n < high:
            ends.hidden[:, e] = room.hidden[:, t - first, n - low]
            ends.cell[:, e] = room.cells[:, t - first, n - low]
