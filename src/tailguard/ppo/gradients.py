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
    """What the workers tell each other about a batch."""

    taken: Array  # (1,) pieces that somebody has begun
    claimed: Array  # (trunks,) how many wanted to lay the weights out
    laid_out: Array  # (trunks,) 1 where that is done
    arrived: Array  # (trunks,) lanes that are finished
    sums: Array  # (trunks, lanes, 5) what their losses add up to


def new_board() -> Board:
    """One for each batch: nobody who is late can write on the next one's."""
    taken, claimed, laid_out, arrived = (np.zeros(n, np.int64) for n in (1, N_TRUNKS, N_TRUNKS, N_TRUNKS))
    return Board(taken, claimed, laid_out, arrived, np.zeros((N_TRUNKS, N_LANES, N_SUMS)))


class Told(NamedTuple):
    """What the workers are told about a batch."""

    pieces: Array  # (n, 2) trunk and lane, in the order in which they are begun
    chosen: Array  # (B,) sequences
    filled: Array  # (2, trunks) whether a trunk, or the risk value beside it, has a gradient already
    numbers: Array  # clip range, coefficients of entropy and KL, divisor of the actor's sum, factor of the critics'


class Batch(NamedTuple):
    """Work that has been shared out."""

    trunks: Collection[int]
    workers: Sequence[Callable[[], None]]  # each to be called once; when all have returned, the work is done
    figures: Callable[[], dict[int, Any]]  # of each trunk, afterwards


class CompiledGradients:
    """Of those trunks that the loops know."""

    def __init__(self, policy: RecurrentPolicy, vector: ParameterVector, with_actor: bool, in_pairs: bool) -> None:
        """Without the actor where its gradient has to go through torch. `in_pairs`: of bfloat16, on the way back."""
        actor = CompiledActor.of(policy, vector, in_pairs) if with_actor else None
        critics = [CompiledCritic.of(policy, vector, c, in_pairs) for c in range(len(policy.critics))]
        self.actor, self.critics = actor, {1 + c: critic for c, critic in enumerate(critics) if critic is not None}
        self.nobody = CompiledRiskValue(None, vector, N_LANES, in_pairs)
        self.rooms: list[Rooms] = []  # of each worker

    def forget(self) -> None:
        """Leave everything to torch."""
        self.actor, self.critics = None, {}

    @property
    def known(self) -> Known:
        """The trunks that the loops may differentiate now."""
        actor: Known = {} if self.actor is None else {ACTOR: self.actor}
        return {j: trunk for j, trunk in (actor | self.critics).items() if trunk.free}

    def begin(self, choice: Choice, now: Knobs, share: float, n_workers: int) -> Batch:
        """`share` of the gradients of the chosen sequences' mean losses, shared out among so many."""
        known, n_valid = self.known, max(choice.n_valid, 1)
        if not known:
            return Batch([], [], dict)
        board = new_board()
        numbers = [now.clip_range, now.ent_coef, now.kl_beta, n_valid / share, now.vf_coef * share / n_valid]
        told = Told(pieces_of(tuple(known), n_workers), choice.chosen, self.announce(known), np.array(numbers))
        key, size = (self, tuple(known), n_workers), lane_size(choice.n_sequences)
        shares = choice.batch.once((*key, size), partial(self.shares, choice.batch, known, n_workers, size))
        workers = [partial(work_off, board, told, *part) for part in shares]
        return Batch(known, workers, partial(figures_of, board.sums, known, now, n_valid))

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
            risks = tuple(self.risk_desk(j, batch, seen, n_rows) for j in CRITICS)
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


def figures_of(sums: Array, known: Collection[int], now: Knobs, n_valid: int) -> dict[int, Any]:
    """Means over the batch's valid samples, by trunk."""
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
    """Take the next piece until none is left."""
    board, told, (desks, taken, lessons, risks) = borrowed((board, told, (desks, taken, lessons, risks)))
    pieces, chosen, filled, numbers = told
    n_pieces = len(pieces)
    while True:
        piece = add_one(board.taken.ctypes.data)
        if piece >= n_pieces:
            break
        j, i = pieces[piece]
        desk = desks[j]
        lay_out(board, j, desk)
        lane, sums = lane_of(desk, i, chosen), board.sums[j, i]
        if j == ACTOR:
            sums[:] = actor_lane(lane, taken, numbers)
        else:
            risk, factor = risks[j - 1], np.float32(numbers[4])
            sums[0], sums[1] = critic_lane(lane, lessons[j - 1], factor, risk, risk.gradients[i])
        if add_one(board.arrived.ctypes.data + 8 * j) == N_LANES - 1:
            leave(desk, filled[0, j])
            if j != ACTOR and risks[j - 1].weights.size:
                leave(risks[j - 1], filled[1, j])


@compiled
def lay_out(board, j, desk):  # type: ignore[no-untyped-def]
    """Lay a trunk's weights out, or wait for the one who does."""
    if add_one(board.claimed.ctypes.data + 8 * j) == 0:
        pack(desk.shape, desk.weights, desk.packed)
        pack_back(desk.shape, desk.weights, desk.back)
        add_one(board.laid_out.ctypes.data + 8 * j)
    while latest(board.laid_out.ctypes.data + 8 * j) == 0:
        pass


@compiled
def leave(desk, filled):  # type: ignore[no-untyped-def]
    """Hand over the sum of the lanes' gradients."""
    add_lanes(desk.shape, desk.gradients[0], desk.gradients[1], filled, desk.result)
