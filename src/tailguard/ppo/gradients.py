"""The gradients of one batch in compiled loops, shared out among workers who need nothing from the interpreter.

A batch is always cut into the same pieces, two lanes of every trunk, and lanes are added in the same order, so that any
number of workers gives the same bits. Each worker takes the next piece until none is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from tailguard.loops import add_one, borrowed, compiled, latest
from tailguard.optim.flat import ParameterVector
from tailguard.policy import RecurrentPolicy
from tailguard.policy.packing import add_lanes, pack, pack_back
from tailguard.policy.products import Array
from tailguard.policy.rooms import Rooms
from tailguard.ppo.lanes import (
    N_LANES,
    CompiledActor,
    CompiledCritic,
    Desk,
    Lesson,
    Taken,
    actor_lane,
    critic_lane,
    lane_of,
    lane_size,
)
from tailguard.ppo.objective import ActorFigures, CriticFigures, Knobs
from tailguard.ppo.risk_lane import CompiledRiskValue, RiskDesk
from tailguard.rollout.sequences import Choice, SequenceBatch

ACTOR, CRITICS = 0, (1, 2)
N_TRUNKS = 1 + len(CRITICS)
N_SUMS = 5  # of an actor's lane; a critic's has fewer
NO_ROWS = np.zeros((0, 0), np.float32)
NO_VALUES, NO_FLAGS = np.zeros((0, 0, 0), np.float32), np.zeros((0, 0), np.bool_)
NOTHING_TAKEN = Taken(NO_VALUES, NO_ROWS, NO_ROWS, NO_FLAGS, (0, 0))
NO_LESSON = Lesson(NO_VALUES, NO_FLAGS, np.zeros(0, np.float32), np.float32(0.0))

Share = tuple[tuple[Desk, ...], Taken, tuple[Lesson, ...], tuple[RiskDesk, ...]]

Known = dict[int, CompiledActor | CompiledCritic]


class Board(NamedTuple):
    """What the workers tell each other about K batches."""

    taken: Array  # (K,) pieces that somebody has begun
    claimed: Array  # (K, trunks) how many wanted to lay the weights out
    laid_out: Array  # (K, trunks) 1 where that is done
    arrived: Array  # (K, trunks) lanes that are finished
    handed_over: Array  # (K,) trunks whose gradient is in its place
    sums: Array  # (K, trunks, lanes, 5) what their losses add up to


def new_board(n: int) -> Board:
    """One for each call: nobody who is late can write on the next one's."""
    per_batch, per_trunk = (n,), (n, N_TRUNKS)
    extents = per_batch, per_trunk, per_trunk, per_trunk, per_batch
    taken, claimed, laid_out, arrived, handed_over = (np.zeros(extent, np.int64) for extent in extents)
    return Board(taken, claimed, laid_out, arrived, handed_over, np.zeros((n, N_TRUNKS, N_LANES, N_SUMS)))


class Told(NamedTuple):
    """What the workers are told about K batches."""

    pieces: Array  # (n, 2) trunk and lane, in the order in which they are begun
    chosen: Array  # (B,) sequences of all batches
    firsts: Array  # (K + 1,) where those of each begin
    filled: Array  # (2, trunks) whether a trunk, or the risk value beside it, has a gradient already
    numbers: Array  # (K, 5) clip range, coefficients of entropy and KL, divisor of the actor's sum, factor of critics'


class Work(NamedTuple):
    """Work that has been shared out."""

    trunks: Collection[int]
    workers: Sequence[Callable[[], None]]  # each to be called once; when all have returned, the work is done
    figures: Callable[[], list[dict[int, Any]]]  # of each batch and trunk, afterwards


class CompiledGradients:
    """Of those trunks that the loops know."""

    def __init__(self, policy: RecurrentPolicy, vector: ParameterVector, with_actor: bool, in_pairs: bool) -> None:
        """Without the actor where its gradient has to go through torch. `in_pairs`: of bfloat16, on the way back."""
        actor = CompiledActor.of(policy, vector, in_pairs) if with_actor else None
        critics = [CompiledCritic.of(policy, vector, c, in_pairs) for c in range(len(policy.critics))]
        self.actor, self.critics = actor, {1 + c: critic for c, critic in enumerate(critics) if critic is not None}
        self.nobody = CompiledRiskValue(None, vector, N_LANES, in_pairs)
        self.n_parameters = vector.flat.numel()
        self.left_to_torch: set[int] = set()  # trunks that are not, or no longer, what the loops know
        self.rooms: list[Rooms] = []  # of each worker

    def look(self, policy: RecurrentPolicy) -> None:
        """Find out which trunks the loops know, before an update: somebody may have changed or hooked a module."""
        risk_value, memories = policy.risk_value, [policy.compiled_actor()]
        memories += [critic.compiled_memory() for critic in policy.critic_list]
        self.left_to_torch = {j for j, memory in enumerate(memories) if memory is None}
        if risk_value is not None and not risk_value.is_known():
            self.left_to_torch.add(CRITICS[0])

    def forget(self) -> None:
        """Leave everything to torch."""
        self.actor, self.critics = None, {}

    @property
    def whole(self) -> bool:
        """Whether no gradient is left to torch."""
        known = self.known.values()
        stretches = [part.trunk.stretch for part in known]
        stretches += [part.risk_value.stretch for part in known if isinstance(part, CompiledCritic)]
        return bool(sum(stretch.stop - stretch.start for stretch in stretches) == self.n_parameters)

    @property
    def known(self) -> Known:
        """The trunks that the loops may differentiate now."""
        actor: Known = {} if self.actor is None else {ACTOR: self.actor}
        known = (actor | self.critics).items()
        return {j: trunk for j, trunk in known if trunk.free and j not in self.left_to_torch}

    def begin(self, choices: Sequence[Choice], now: Knobs, share: float, n_workers: int) -> Work:
        """`share` of the gradients of the chosen sequences' mean losses, shared out among so many workers."""
        known, n_valid = self.known, [max(choice.n_valid, 1) for choice in choices]
        if not known:
            return Work([], [], lambda: [{}])
        weights = now.clip_range, now.ent_coef, now.kl_beta
        numbers = [(*weights, n / share, now.vf_coef * share / n) for n in n_valid]
        sizes, board = [choice.n_sequences for choice in choices], new_board(len(choices))
        told = Told(
            pieces_of(tuple(known), n_workers),
            np.concatenate([choice.chosen for choice in choices]),
            np.cumsum([0, *sizes]),
            self.announce(known),
            np.array(numbers),
        )
        batch, size = choices[0].batch, lane_size(max(sizes))
        key = self, tuple(known), n_workers, size
        shares = batch.once(key, partial(self.shares, batch, known, n_workers, size))
        workers = [partial(work_off, board, told, *part) for part in shares]
        return Work(
            known, workers, lambda: [figures_of(*done, known, now) for done in zip(board.sums, n_valid, strict=True)]
        )

    def announce(self, known: Known) -> Array:
        """Say which gradients there will be; returns which are there already."""
        filled = np.zeros((2, N_TRUNKS), np.bool_)
        for j, part in known.items():
            filled[0, j] = part.trunk.stretch.announce()
            filled[1, j] = isinstance(part, CompiledCritic) and part.risk_value.stretch.announce()
        return filled

    def shares(self, batch: SequenceBatch, known: Known, n_workers: int, size: int) -> list[Share]:
        """What each worker reads and writes; of an unknown trunk, what another one has: nobody will look at it."""
        while len(self.rooms) < n_workers:
            self.rooms.append(Rooms())
        seen = {j: part.seen(batch) for j, part in known.items()}
        lessons = tuple(part.lesson(batch) if (part := self.critics.get(j)) else NO_LESSON for j in CRITICS)
        taken = NOTHING_TAKEN if self.actor is None else self.actor.taken(batch)
        n_rows = len(batch.starts) * size
        shares: list[Share] = []
        for rooms in self.rooms[:n_workers]:
            desks = {j: part.trunk.desk(rooms, seen[j], size) for j, part in known.items()}
            anybody = next(iter(desks.values()))
            risks = tuple(self.risk_desk(j, batch, seen, n_rows) for j in range(N_TRUNKS))
            shares.append((tuple(desks.get(j, anybody) for j in range(N_TRUNKS)), taken, lessons, risks))
        return shares

    def risk_desk(self, j: int, batch: SequenceBatch, seen: dict[int, Any], n_rows: int) -> RiskDesk:
        risk_value = self.critics[j].risk_value if j in seen and j in self.critics else self.nobody
        return risk_value.desk(seen[j].x if j in seen else NO_VALUES, batch.risk.numpy(), n_rows)


@cache
def pieces_of(trunks: tuple[int, ...], n_workers: int) -> Array:
    """(n, 2) one after another: one worker ends what it began, and so do two with trunks of their own.

    The first worker begins a moment before the other, so it takes a critic; the actor has less to do, and whoever has
    it comes back first.
    """
    pieces = [(j, i) for j in trunks for i in range(N_LANES)]
    if n_workers > 1 and trunks[0] == ACTOR and len(trunks) > 1:
        first_critic = pieces[N_LANES : 2 * N_LANES]
        pieces = [first_critic[0], *pieces[:N_LANES], *first_critic[1:], *pieces[2 * N_LANES :]]
    return np.array(pieces)


def figures_of(sums: Array, n_valid: int, known: Collection[int], now: Knobs) -> dict[int, Any]:
    """Means over a batch's valid samples, by trunk."""
    lanes = sums.tolist()
    means = [[sum(part) / n_valid for part in zip(*each, strict=True)] for each in lanes]
    figures: dict[int, Any] = {j: CriticFigures(*means[j][:2]) for j in known if j != ACTOR}
    if ACTOR in known:
        surrogate, entropy, kl, clipped, _ = means[ACTOR]
        largest = max(lane[-1] for lane in lanes[ACTOR])
        total = surrogate - now.ent_coef * entropy + now.kl_beta * kl
        figures[ACTOR] = ActorFigures(total, surrogate, entropy, kl, clipped, largest)
    return figures


@compiled
def work_off(board, told, desks, taken, lessons, risks):  # type: ignore[no-untyped-def]
    """Take part in batch after batch."""
    board, told = borrowed((board, told))
    share = borrowed((desks, taken, lessons, risks))
    for k in range(len(board.taken)):
        work_off_batch(k, board, told, share)


@compiled
def work_off_batch(k, board, told, share):  # type: ignore[no-untyped-def]
    """Take the next piece until none is left."""
    desks, taken, lessons, risks = share
    chosen, filled, numbers = told.chosen[told.firsts[k] : told.firsts[k + 1]], told.filled, told.numbers[k]
    while True:
        piece = add_one(board.taken.ctypes.data + 8 * k)
        if piece >= len(told.pieces):
            break
        j, i = told.pieces[piece]
        desk, risk, place = desks[j], risks[j], 8 * (N_TRUNKS * k + j)
        lay_out(board, place, desk, risk)
        lane, sums = lane_of(desk, i, chosen), board.sums[k, j, i]
        if j == ACTOR:
            sums[:] = actor_lane(lane, taken, numbers)
        else:
            sums[0], sums[1] = critic_lane(lane, lessons[j - 1], np.float32(numbers[4]), risk, risk.gradients[i])
        if add_one(board.arrived.ctypes.data + place) == N_LANES - 1:
            leave(desk, filled[0, j])
            if risk.weights.size:
                leave(risk, filled[1, j])
            add_one(board.handed_over.ctypes.data + 8 * k)


@compiled
def lay_out(board, place, desk, risk):  # type: ignore[no-untyped-def]
    """Lay the weights of a trunk and of the risk value beside it out, or wait for the one who does.

    place: where the board counts them, in bytes
    """
    if add_one(board.claimed.ctypes.data + place) == 0:
        pack_both_ways(desk)
        pack_both_ways(risk)
        add_one(board.laid_out.ctypes.data + place)
    while latest(board.laid_out.ctypes.data + place) == 0:
        pass


@compiled
def pack_both_ways(desk):  # type: ignore[no-untyped-def]
    pack(desk.shape, desk.weights, desk.packed)
    pack_back(desk.shape, desk.weights, desk.back)


@compiled
def leave(desk, filled):  # type: ignore[no-untyped-def]
    """Hand over the sum of the lanes' gradients."""
    add_lanes(desk.shape, desk.gradients[0], desk.gradients[1], filled, desk.result)
