"""Gradients of the actor's and the critics' losses in compiled loops, from the sequences to the weights.

objective.py with torch's gradients remains the definition, the oracle, and the path of everything these loops do not
know: GRU, other devices and activations, squashed actions, categorical critics, clipped values.

A batch is always cut into the same two lanes, and their gradients are added in the same order, so that any number of
threads gives the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from tailguard.errors import StateError
from tailguard.loops import compiled, wide_vectors
from tailguard.losses.surrogate import actor_objective_kernel
from tailguard.losses.value import quantile_huber_kernel
from tailguard.optim.flat import ParameterVector
from tailguard.policy import RecurrentPolicy, State
from tailguard.policy.action_heads import ActionHead, CategoricalHead, GaussianHead
from tailguard.policy.critics import QuantileHead
from tailguard.policy.head_kernels import law_slopes, law_terms
from tailguard.policy.lstm_kernel import ZERO
from tailguard.policy.policy import Critic, Trunk
from tailguard.policy.products import Array
from tailguard.policy.recurrent import LSTM
from tailguard.policy.rooms import Rooms
from tailguard.policy.trunk_kernel import (
    Room,
    Seen,
    copy_row,
    features_of,
    last_out,
    trunk_backward,
    trunk_forward,
)
from tailguard.policy.trunk_layout import Shape, memory_size, room_for_back, room_for_packed, shape_of
from tailguard.ppo.risk_lane import CompiledRiskValue, learn_beside
from tailguard.ppo.stretch import Stretch
from tailguard.rollout import SequenceBatch

N_LANES = 2
MOST_SEQUENCES = 64  # at a time: more would only need more room
NOTHING_CHOSEN = np.zeros(0, np.int64)


class Desk(NamedTuple):
    """All that one worker needs for the gradient of a trunk."""

    shape: Shape
    weights: Array  # (P,) of the trunk and its head
    packed: Array  # for the way there
    back: Array  # for the way back
    gradients: tuple[Array, ...]  # (P,) per lane
    result: Array  # (P,) where their sum goes
    room: Room
    seen: Seen


class Lane(NamedTuple):
    """One share of a batch, and what belongs to it alone."""

    shape: Shape
    weights: Array  # (P,) of the trunk and its head
    packed: Array  # for the way there
    back: Array  # for the way back
    gradient: Array  # (P,)
    room: Room
    seen: Seen
    low: int
    high: int


class Taken(NamedTuple):
    """What the actor's loss reads of all sequences, (L, S, ...)."""

    actions: Array
    log_probs: Array
    advantages: Array
    valid: Array
    log_std: tuple[int, int]  # where it lies among the weights; nowhere for a categorical law


class Lesson(NamedTuple):
    """What a critic's loss reads of all sequences."""

    target: Array  # (L, S, K)
    valid: Array  # (L, S)
    levels: Array  # (Q,)
    kappa: np.float32


class CompiledTrunk:
    """A trunk with its head, ready for the loops."""

    def __init__(
        self,
        vector: ParameterVector,
        memory: LSTM,
        trunk: Trunk,
        head: nn.Module,
        last: nn.Linear,
        in_pairs: bool,
        rounded: bool = False,
    ) -> None:
        """Factors of bfloat16: `in_pairs` on the way back, `rounded` on the way there."""
        inside = {id(parameter) for module in (trunk, head) for parameter in module.parameters()}
        own = [parameter for parameter in vector.parameters if id(parameter) in inside]
        self.stretch = Stretch(vector, own, N_LANES)
        self.shape = shape_of(memory, trunk.linear(last), trunk.activation, self.stretch.begins, rounded)
        size = memory_size(self.shape)
        if size > self.shape.dense[:, :2].min() or size < self.shape.recurrent.max():
            raise StateError("The loops need a trunk's memory to come first among its parameters.")
        self.packed = room_for_packed(self.shape)
        self.back = room_for_back(self.shape, in_pairs)

    def desk(self, rooms: Rooms, seen: Seen, size: int) -> Desk:
        """With room for so many sequences at a time."""
        stretch, room = self.stretch, rooms.of(self.shape, len(seen.starts), size)
        weights = stretch.weights, self.packed, self.back
        return Desk(self.shape, *weights, stretch.gradients, stretch.result, room, seen)


@compiled
def lane_of(desk, i, chosen):  # type: ignore[no-untyped-def]
    """The i-th lane of a batch of chosen sequences."""
    shape, weights, packed, back, gradients, _, room, (x, starts, hidden, cell, _) = desk
    share = -(-len(chosen) // N_LANES)
    low, high = min(i * share, len(chosen)), min((i + 1) * share, len(chosen))
    seen = Seen(x, starts, hidden, cell, chosen)
    return Lane(shape, weights, packed, back, gradients[i], room, seen, low, high)


def seen_of(batch: SequenceBatch, observations: Tensor, state: State) -> Seen:
    """All sequences, of which nothing is chosen yet."""
    starts = np.ascontiguousarray(batch.starts)  # one layout, one compilation
    hidden, cell = (part.contiguous().numpy() for part in state)
    return Seen(observations.numpy(), starts, hidden, cell, NOTHING_CHOSEN)


def lane_size(n_sequences: int) -> int:
    """Sequences that a lane works on at a time."""
    return min(-(-n_sequences // N_LANES), MOST_SEQUENCES)


# the actor


class CompiledActor:
    """The actor's losses and their gradient."""

    def __init__(self, trunk: CompiledTrunk, head: ActionHead) -> None:
        self.trunk, self.log_std = trunk, (0, 0)
        if isinstance(head, GaussianHead):
            first = trunk.stretch.begins(head.log_std)
            self.log_std = (first, first + head.action_dim)

    @classmethod
    def of(cls, policy: RecurrentPolicy, vector: ParameterVector, in_pairs: bool) -> CompiledActor | None:
        """None where the loops do not know the policy."""
        head = policy.action_head
        plain_gaussian = isinstance(head, GaussianHead) and head.bounds == "clip"
        plain_choice = isinstance(head, CategoricalHead) and not head.ragged
        memory = policy.compiled_actor() if plain_gaussian or plain_choice else None
        if memory is None:
            return None
        return cls(CompiledTrunk(vector, memory, policy.actor, head, head.last_layer, in_pairs), head)

    @property
    def free(self) -> bool:
        return self.trunk.stretch.free

    def seen(self, batch: SequenceBatch) -> Seen:
        return seen_of(batch, batch.observations, batch.actor_state)

    def taken(self, batch: SequenceBatch) -> Taken:
        actions, log_probs, advantages = (part.numpy() for part in (batch.actions, batch.log_probs, batch.advantages))
        return Taken(actions, log_probs, advantages, batch.valid.numpy(), self.log_std)


@compiled
def actor_lane(lane, taken, numbers):  # type: ignore[no-untyped-def]
    """Fill a lane's gradient; returns the sums of actor_objective_kernel.

    numbers: clip range, entropy coefficient, KL coefficient, and what the sum of gradients is divided by
    """
    shape, weights, packed, back, gradient, room, seen, start, end = lane
    n_steps, size = room.kept.shape
    rows, output, d_output = n_steps * size, last_out(shape, room, room.outs), last_out(shape, room, room.d_outs)
    low, high = taken.log_std
    log_std, d_log_std = weights[low:high], gradient[low:high]
    parameters = np.zeros((rows, output.shape[1] + log_std.size), np.float32)
    actions = np.zeros((rows, taken.actions.shape[2]), np.float32)
    flat, valid = np.zeros((6, rows), np.float32), np.zeros(rows, np.bool_)
    old, advantage, log_prob = flat[0], flat[1], flat[2]
    entropy, d_log_prob, d_entropy = flat[3], flat[4], flat[5]
    sums = np.zeros(5)
    clear(shape, gradient, start == end)
    for low in range(start, end, size):
        trunk_forward(shape, weights, packed, room, seen, low, end)
        find_valid(taken.valid, seen.chosen[low:end], valid)
        gather_taken(taken, seen.chosen[low:end], valid, actions, old, advantage)
        law_terms(output, log_std, actions, parameters, log_prob, entropy)
        some = actor_objective_kernel(
            log_prob, entropy, old, advantage, valid, numbers[:3], numbers[3], d_log_prob, d_entropy
        )
        sums[:4] += some[:4]
        sums[4] = max(sums[4], some[4])
        law_slopes(actions, parameters, d_log_prob, d_entropy, d_output, d_log_std)
        trunk_backward(shape, back, room, gradient, low > start)
    return sums


@compiled
def weigh_row(row, factor, counts):  # type: ignore[no-untyped-def]
    """Multiply a sample's gradient, which is zero where it does not count."""
    wide_vectors()
    for j in range(len(row)):
        row[j] = factor * row[j] if counts else ZERO


@compiled
def clear(shape, gradient, empty):  # type: ignore[no-untyped-def]
    """Zero what the loops add to; the memory's part is filled by the first of them, unless the lane is empty."""
    gradient[0 if empty else memory_size(shape) :] = ZERO


@compiled
def find_valid(valid, chosen, counts):  # type: ignore[no-untyped-def]
    """Which rows (t, i) of the chosen sequences count; of those that the room has left, none does."""
    size = len(counts) // len(valid)
    for m in range(len(counts)):
        i = m % size
        counts[m] = i < len(chosen) and valid[m // size, chosen[i]]


@compiled
def gather_taken(taken, chosen, valid, actions, old, advantage):  # type: ignore[no-untyped-def]
    """What was done in the rows that count; the others become zero."""
    size = len(valid) // len(taken.valid)
    for m in range(len(valid)):
        old[m] = advantage[m] = ZERO
        actions[m] = ZERO
        if valid[m]:
            t, s = m // size, chosen[m % size]
            old[m], advantage[m] = taken.log_probs[t, s], taken.advantages[t, s]
            for a in range(actions.shape[1]):
                actions[m, a] = taken.actions[t, s, a]


# the critics


class CompiledCritic:
    """One critic's loss and its gradient, and those of the risk value that reads its features."""

    def __init__(self, trunk: CompiledTrunk, critic: Critic, c: int, risk_value: CompiledRiskValue) -> None:
        head = critic.head
        self.trunk, self.sight, self.c, self.risk_value, self.head = trunk, critic.sight, c, risk_value, critic.head
        self.levels, self.kappa = np.array(head.levels, np.float32), np.float32(head.config.huber_kappa)

    @classmethod
    def of(cls, policy: RecurrentPolicy, vector: ParameterVector, c: int, in_pairs: bool) -> CompiledCritic | None:
        """None where the loops do not know the critic."""
        critic = policy.critic_list[c]
        head = critic.head
        if not isinstance(head, QuantileHead) or head.config.value_clip is not None:
            return None
        memory = critic.compiled_memory()
        if memory is None or (c == 0 and policy.risk_value is not None and not policy.risk_value.is_known()):
            return None
        risk_value = CompiledRiskValue(policy.risk_value if c == 0 else None, vector, N_LANES, in_pairs)
        trunk = CompiledTrunk(vector, memory, critic.trunk, head, head.last_layer, in_pairs, head.config.rounded)
        return cls(trunk, critic, c, risk_value)

    @property
    def free(self) -> bool:
        clips = self.head.config.value_clip is not None  # a callback may have set it
        return self.trunk.stretch.free and self.risk_value.stretch.free and not clips

    def seen(self, batch: SequenceBatch) -> Seen:
        return seen_of(batch, self.sight(batch.observations), batch.critic_states[self.c])

    def lesson(self, batch: SequenceBatch) -> Lesson:
        return Lesson(batch.target.numpy(), batch.valid.numpy(), self.levels, self.kappa)


@compiled
def critic_lane(lane, lesson, factor, beside, d_beside):  # type: ignore[no-untyped-def]
    """Fill a lane's gradients; returns the sums of the critic's and of the risk value's losses.

    factor: on the gradient of each sample;  beside: the desk of the risk value;  d_beside: its gradient
    """
    shape, weights, packed, back, gradient, room, seen, start, end = lane
    n_steps, size = room.kept.shape
    rows, output, d_output = n_steps * size, last_out(shape, room, room.outs), last_out(shape, room, room.d_outs)
    samples, loss = np.zeros((rows, lesson.target.shape[2]), np.float32), np.zeros(rows, np.float32)
    counts = np.zeros(rows, np.bool_)
    total = risk_total = 0.0
    clear(shape, gradient, start == end)
    d_beside[:] = ZERO
    for low in range(start, end, size):
        trunk_forward(shape, weights, packed, room, seen, low, end)
        chosen = seen.chosen[low:end]
        find_valid(lesson.valid, chosen, counts)
        for m in range(rows):
            if counts[m]:
                copy_row(lesson.target[m // size, chosen[m % size]], samples[m])
        quantile_huber_kernel(output, samples, lesson.levels, lesson.kappa, loss, d_output)
        for m in range(rows):
            total += float(loss[m]) if counts[m] else 0.0
            weigh_row(d_output[m], factor, counts[m])
        if beside.weights.size:
            risk_total += learn_beside(beside, d_beside, features_of(shape, room), chosen, counts, factor)
        trunk_backward(shape, back, room, gradient, low > start)
    return total, risk_total
