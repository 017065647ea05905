"""A trunk and the last layer of its head over the steps of a rollout in compiled loops, without gradient.

The steps go through the loops in pieces, so that the room they need stays in the cache however long a rollout is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tailguard.loops import borrowed, compiled
from tailguard.policy.lstm_kernel import ZERO
from tailguard.policy.packing import packed_weights
from tailguard.policy.products import Array
from tailguard.policy.recurrent import LSTM, State
from tailguard.policy.rooms import Rooms
from tailguard.policy.trunk_kernel import Seen, features_of, last_out, trunk_forward
from tailguard.policy.trunk_layout import weights_of

MOST_SEQUENCES = 64  # at a time
MOST_ROWS = 512  # steps of sequences at a time
ROOMS = Rooms()
NOWHERE = np.zeros((0, 2), np.int64)


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

    def __init__(
        self, memory: LSTM, linear: Sequence[nn.Linear], activation: str, rounded: bool, sequence_length: int
    ) -> None:
        self.shape, self.flat = weights_of(memory, linear, activation, rounded)
        self.packed = packed_weights(self.shape, self.flat)
        self.sequence_length, self.n_features, self.n_outputs = sequence_length, *linear[-1].weight.shape[::-1]

    def begin(self, state: State, n_steps: int, with_features: bool) -> Reading:
        """Open a rollout of so many steps after `state`; features are left out where nobody asks."""
        return Reading(self, state, n_steps, self.n_features if with_features else 0)

    def read(self, seen: Seen, found: Found, where: Array, ended: Seen, n_envs: int) -> None:
        """Fill what is found and the states of `ended`; seen.hidden and seen.cell become the state after the last step.

        where: (E, 2) step and environment of those states;  n_envs: of the whole rollout, which decides on the pieces
        """
        length, size = piece_sizes(self.sequence_length, n_envs)
        rooms = ROOMS.of(self.shape, length, size), ROOMS.of(self.shape, 1, size)
        trunk = self.shape, self.flat, self.packed, *rooms, self.sequence_length
        read_kernel(trunk, seen, found, where, ended)

    def findings(self, n_steps: int, n_envs: int, n_features: int) -> Found:
        states = -(-n_steps // self.sequence_length), self.shape.n_layers, n_envs, self.shape.n_units
        extents = (n_steps, n_envs, self.n_outputs), (n_steps, n_envs, n_features), states, states
        return Found(*(np.empty(extent, np.float32) for extent in extents))


class Reading:
    """One rollout, read step by step as it grows."""

    def __init__(self, reader: TrunkReader, state: State, n_steps: int, n_features: int) -> None:
        self.reader, self.n_features = reader, n_features
        self.hidden, self.cell = (np.array(part.numpy(), order="C") for part in state)  # after the last step read
        self.n_envs, self.position = self.hidden.shape[1], 0
        self.found = reader.findings(n_steps, self.n_envs, n_features)
        self.ended: list[Seen] = []  # states after which an observation aside follows

    def read(self, x: Tensor, starts: Array, where: Array) -> None:
        """The next steps: whole sequences, or all that is left.

        x: (t, N, F);  starts: (t, N);  where: (E, 2) step of these and environment after which one aside follows
        """
        first, last = self.position, self.position + len(starts)
        length = self.reader.sequence_length
        sequences = slice(first // length, -(-last // length))
        output, features, hidden, cell = self.found
        found = Found(output[first:last], features[first:last], hidden[sequences], cell[sequences])
        ended = single_step(torch.empty(len(where), 0), np.zeros(len(where), np.bool_), *self.states(len(where)))
        seen = Seen(
            x.contiguous().numpy(), np.ascontiguousarray(starts), self.hidden, self.cell, np.arange(self.n_envs)
        )
        self.reader.read(seen, found, np.ascontiguousarray(where), ended, self.n_envs)
        self.ended.append(ended)
        self.position = last

    def conclude(self, aside: Tensor, following: Tensor, next_starts: Array) -> Read:
        """What was said of all steps, of the observations aside (E, F), which change no state, and of those (N, F)
        after the last step, which may start episodes."""
        states = [state_of(*before) for before in zip(self.found.hidden, self.found.cell, strict=True)]
        after = state_of(self.hidden, self.cell)
        ended = (np.concatenate([getattr(part, name) for part in self.ended], 1) for name in ("hidden", "cell"))
        said_aside = self.say(single_step(aside, np.zeros(len(aside), np.bool_), *ended))
        said_next = self.say(single_step(following, next_starts, self.hidden.copy(), self.cell.copy()))
        return Read(said(self.found), said_aside, said_next, states, after)

    def say(self, seen: Seen) -> Said:
        """Of single observations, from states of their own."""
        found = self.reader.findings(1, seen.starts.shape[1], self.n_features)
        if seen.starts.size:
            self.reader.read(seen, found, NOWHERE, self.nothing(), self.n_envs)
        return Said(torch.from_numpy(found.output[0]), torch.from_numpy(found.features[0]))

    def nothing(self) -> Seen:
        return single_step(torch.empty(0, 0), np.zeros(0, np.bool_), *self.states(0))

    def states(self, n: int) -> tuple[Array, Array]:
        """Hidden states and cells of n environments, to be filled."""
        extents = self.reader.shape.n_layers, n, self.reader.shape.n_units
        return np.empty(extents, np.float32), np.empty(extents, np.float32)


def single_step(x: Tensor, starts: Array, hidden: Array, cell: Array) -> Seen:
    """One step of n environments. x: (n, F);  starts: (n,)"""
    rows = x[None].contiguous().numpy()
    return Seen(rows, np.ascontiguousarray(starts[None]), hidden, cell, np.arange(len(starts)))


def said(found: Found) -> Said:
    return Said(torch.from_numpy(found.output), torch.from_numpy(found.features))


def state_of(hidden: Array, cell: Array) -> State:
    return State(torch.from_numpy(hidden), torch.from_numpy(cell))


def piece_sizes(sequence_length: int, n_envs: int) -> tuple[int, int]:
    """Steps and environments at a time: shares that are nearly equal, so that little of the room stays empty."""
    n_chunks = max(-(-n_envs // MOST_SEQUENCES), 1)
    size = max(-(-n_envs // n_chunks), 1)
    n_pieces = -(-sequence_length // max(MOST_ROWS // size, 1))
    return sequence_length // n_pieces, size


@compiled
def read_kernel(trunk, seen, found, where, ends):  # type: ignore[no-untyped-def]
    """Fill `found` and the states of `ends`; seen.hidden and seen.cell become the state after the last step."""
    trunk, seen, found = borrowed((trunk, seen, found))
    whole, single, sequence_length = trunk[3:]
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
                read_piece(trunk[:3], room, seen, first, low, high, found)
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
    shape, flat, packed = weights
    n_steps, size = room.kept.shape
    last, n = first + n_steps, high - low
    forget_where_episodes_start(seen, first, low, high)
    piece = Seen(seen.x[first:last], seen.starts[first:last], seen.hidden, seen.cell, seen.chosen)
    trunk_forward(shape, flat, packed, room, piece, low, high)
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
