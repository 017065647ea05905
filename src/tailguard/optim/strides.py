"""Whole optimizer steps in compiled loops: norms, noise of the gradient, clip, utility, gate, move.

Workers take a step together. A stage of it is a row of pieces, always the same ones; everybody takes the next piece
until none is left, and goes on to the next stage when all are done. So no bit depends on who works, and nobody asks the
interpreter in between, not even between one step and the next. `Learner.apply_gradients` and `GatedOptimizer.advance`
are the definition, the oracle, and the path of everything these loops do not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from torch.optim import Optimizer

from tailguard.loops import add_one, compiled, latest
from tailguard.optim.adaptive_upgd import AdaptiveUPGD
from tailguard.optim.flat import ParameterVector
from tailguard.optim.gating import is_fusable
from tailguard.optim.gradient_scaler import VarianceGradientScaler
from tailguard.optim.gradient_statistics import Reading
from tailguard.optim.kernels import (
    CHUNK,
    SHARE,
    Array,
    commit_gradients,
    move_along_adam,
    observe_gradients,
    squared_norms,
    track_utility_and_moments,
)
from tailguard.optim.upgdw import UPGDW

MOST_STEPS = 16  # at a time: an interrupt waits for their end
MEASURE, TRACK, MOVE = range(3)  # the stages of a step
N_STAGES = 3
ONE = np.float32(1.0)
KNOWN = (AdaptiveUPGD, UPGDW)


class Stride(NamedTuple):
    """K steps of AdaptiveUPGD or UPGDW over P weights; without weights, none.

    A step that is not taken leaves its numbers to the next one: j counts the steps that are.
    """

    weights: Array  # (P,)
    gradient: Array  # (P,) raw, and left so
    utility: Array  # (P,)
    first: Array  # (P,) moment
    second: Array  # (P,)
    noise: Array  # a pool
    places: Array  # (K,) where in it the noise of the j-th begins
    reading: Reading  # what the gradient's noise is measured with
    chunks: Array  # (2, C) where the chunks whose squares are summed begin and end
    stretches: Array  # (S, 2) which of the chunks belong to each stretch whose norm is wanted
    most: float  # the largest norm that is not clipped
    averaging: Array  # numbers of track_utility_and_moments
    corrections: Array  # (K,) of the j-th utility's average
    moving: Array  # (K, 5) numbers of move_along_adam for the j-th, but for the first two
    protect_weights: bool
    patience: Array  # (2,) steps in a row that were not taken, and how many of them end everything
    found: Found

    def squares(self) -> list[list[float]]:
        """(K, S) squared norm of every stretch, in each step."""
        stretches = self.stretches.tolist()
        return [[sum(row[first:last]) for first, last in stretches] for row in self.found.squares.tolist()]


class Found(NamedTuple):
    """What workers find out about K steps, and tell each other."""

    squares: Array  # (K, C) sums of squares
    shares: Array  # (K, shares, 3) lowest and highest utility, and the sum of the gates
    board: Array  # (K, stages, 2) pieces that were begun and that are done
    taken: Array  # (K,) whether the step was taken
    noted: Array  # (K,) whether what was seen of the gradient's noise counts


NO_NUMBERS, NO_COUNTS, NO_PAIRS = np.zeros(0), np.zeros(0, np.int64), np.zeros((0, 2), np.int64)
NO_WEIGHTS, NO_ROWS, NO_FLAGS = np.zeros(0, np.float32), np.zeros((0, 3)), np.zeros(0, np.bool_)
NO_STRIDE = Stride(
    weights=NO_WEIGHTS,
    gradient=NO_WEIGHTS,
    utility=NO_WEIGHTS,
    first=NO_WEIGHTS,
    second=NO_WEIGHTS,
    noise=NO_WEIGHTS,
    places=NO_COUNTS,
    reading=Reading(NO_COUNTS, NO_PAIRS, NO_COUNTS, NO_WEIGHTS, NO_WEIGHTS, NO_ROWS, NO_ROWS, 0.0),
    chunks=NO_PAIRS,
    stretches=NO_PAIRS,
    most=0.0,
    averaging=NO_WEIGHTS,
    corrections=NO_NUMBERS,
    moving=np.zeros((0, 5), np.float32),
    protect_weights=True,
    patience=NO_COUNTS,
    found=Found(NO_ROWS, np.zeros((0, 0, 3)), np.zeros((0, N_STAGES, 2), np.int64), NO_FLAGS, NO_FLAGS),
)


class Strides:
    """Steps of an optimizer over one flat parameter, as far as the loops know them."""

    def __init__(
        self, optimizer: Optimizer, scaler: VarianceGradientScaler, vector: ParameterVector, cuts: Sequence[int]
    ) -> None:
        """cuts: where the stretches begin whose norms are wanted, and where the last of them ends"""
        self.optimizer, self.scaler, self.vector = optimizer, scaler, vector
        chunks = [[(i, min(i + CHUNK, end)) for i in range(start, end, CHUNK)] for start, end in pairwise(cuts)]
        self.chunks = np.array([chunk for stretch in chunks for chunk in stretch], np.int64).T.copy()
        self.stretches = np.array(list(pairwise(np.cumsum([0, *map(len, chunks)]))), np.int64)
        self.n_shares = -(-vector.flat.numel() // SHARE)

    @property
    def most_steps(self) -> int:
        """At a time: none where the loops do not do all that optimizer and scaler would, or somebody hangs on the step;
        one where the scaler damps each by what it saw before it."""
        optimizer = self.optimizer
        known = (
            isinstance(optimizer, AdaptiveUPGD)
            and type(optimizer) in KNOWN  # others may do something else
            and optimizer.gate == "max"
            and optimizer.fused
            and not optimizer.adaptive_noise
            and not optimizer.watched
            and len(optimizer.param_groups) == 1
            and is_fusable(self.vector.flat)
            and self.scaler.statistics.fusable([self.vector.gathered])
        )
        return (1 if self.scaler.config.enabled else MOST_STEPS) if known else 0

    @contextmanager
    def prepared(self, n_steps: int, rate: float, most: float, patience: tuple[int, int]) -> Iterator[Stride]:
        """The next steps, for workers to take inside the context; then everything that counts steps knows of them.

        most: the norm to which a larger gradient is clipped
        patience: steps in a row that were not taken, and how many of them end everything
        """
        optimizer, statistics, found = self.optimizer, self.scaler.statistics, self.nothing_found(n_steps)
        assert isinstance(optimizer, AdaptiveUPGD)  # noqa: S101 (`most_steps` says so)
        self.vector.flat.grad = self.vector.gathered
        (batch,) = optimizer.batches()  # counts a step
        chance, group = optimizer.noise.generator.get_state(), batch.group
        group["lr"] = rate * self.scaler.get_scaling_factor()  # on the gradient the factor would cancel
        batches = [replace(batch, step=batch.step + j) for j in range(n_steps)]
        noises = [optimizer.draw_noise([batch]) for _ in batches]
        moving = [optimizer.moving(*step) for step in zip(batches, noises, strict=True)]
        group["lr"] = rate
        weights, gradient, utility, first, second = batch.parts[0].arrays
        stride = Stride(
            weights,
            gradient,
            utility,
            first,
            second,
            utility if noises[0] is None else optimizer.noise_pool(batch),  # anything, to be multiplied with zero
            np.array([0 if noise is None else noise.offset for noise in noises]),
            statistics.reading([self.vector.gathered]),
            self.chunks,
            self.stretches,
            most,
            optimizer.averaging(group),
            np.array([step.correction for step in batches]),
            np.array(moving, np.float32),
            optimizer.protect == "weights",
            np.array(patience),
            found,
        )
        try:
            yield stride
        finally:
            n_taken = int(found.taken.sum())
            if n_taken < n_steps:  # as if nobody had drawn for the others
                optimizer.noise.generator.set_state(chance)
                for _ in range(n_taken):
                    optimizer.draw_noise([batch])
            batch.states[0]["step"] += n_taken - 1
            if n_taken:
                optimizer.note_moves(batch, found.shares[found.taken, :, 2][-1].tolist())
            self.scaler.step_count += statistics.follow(int(found.noted.sum()))

    def nothing_found(self, n_steps: int) -> Found:
        return Found(
            np.zeros((n_steps, self.chunks.shape[1])),
            np.zeros((n_steps, self.n_shares, 3)),
            np.zeros((n_steps, N_STAGES, 2), np.int64),
            np.zeros(n_steps, np.bool_),
            np.zeros(n_steps, np.bool_),
        )


@compiled
def squares_of(stride, k):  # type: ignore[no-untyped-def]
    """(S,) squared norm of every stretch, in the k-th step."""
    squares = np.zeros(len(stride.stretches))
    for s in range(len(squares)):
        for c in range(stride.stretches[s, 0], stride.stretches[s, 1]):
            squares[s] += stride.found.squares[k, c]
    return squares


@compiled
def take_step(stride, k, finite):  # type: ignore[no-untyped-def]
    """Take part in the k-th step until it is taken; with a gradient or losses that are not finite, none is.

    finite: whether the losses are
    returns: whether to go on with the next one
    """
    found, (in_a_row, limit) = stride.found, (stride.patience[0], stride.patience[1])
    j = found.taken[:k].sum()
    measure(stride, k)
    norm = np.sqrt(squares_of(stride, k).sum())
    if finite and np.isfinite(norm):
        track(stride, k, np.float32(stride.most / norm) if norm > stride.most else ONE)
        move(stride, k, j)
        found.taken[k] = True
    for i in range(k + 1):
        in_a_row = 0 if found.taken[i] else in_a_row + 1
    return in_a_row < limit


@compiled
def measure(stride, k):  # type: ignore[no-untyped-def]
    """The squares of the raw gradient."""
    starts, ends, squares = stride.chunks[0], stride.chunks[1], stride.found.squares[k]
    c = next_piece(stride, k, MEASURE)
    while c < len(squares):
        squared_norms(stride.gradient, starts[c : c + 1], ends[c : c + 1], squares[c : c + 1])
        c = after_this(stride, k, MEASURE)
    wait_for(stride, k, MEASURE, len(squares))


@compiled
def track(stride, k, clip):  # type: ignore[no-untyped-def]
    """See how noisy the raw gradient is, and update the averages with the clipped one."""
    shares = stride.found.shares[k]
    n_pieces = 1 + len(shares)
    i = next_piece(stride, k, TRACK)
    while i < n_pieces:
        if i == 0:
            observe(stride, k)
        else:
            a, b = share_of(stride, i - 1)
            low, high = track_utility_and_moments(
                stride.weights[a:b],
                stride.gradient[a:b],
                stride.utility[a:b],
                stride.first[a:b],
                stride.second[a:b],
                clip,
                stride.averaging,
            )
            shares[i - 1, 0], shares[i - 1, 1] = low, high
        i = after_this(stride, k, TRACK)
    wait_for(stride, k, TRACK, n_pieces)


@compiled
def observe(stride, k):  # type: ignore[no-untyped-def]
    """What counts so far lies in one of two means, by turns."""
    addresses, blocks, firsts, mean, new_mean, kept, new, beta = stride.reading
    if stride.found.noted[:k].sum() % 2:
        mean, new_mean = new_mean, mean
    observe_gradients(addresses, blocks, firsts, mean, new_mean, kept, new, beta)


@compiled
def move(stride, k, j):  # type: ignore[no-untyped-def]
    """Compare every utility with the best of all, and step along the gated direction; then what was seen counts."""
    shares, correction = stride.found.shares[k], stride.corrections[j]
    best = shares[:, 1].max() / correction
    numbers = np.empty(7, np.float32)
    numbers[0], numbers[2:] = 0.0, stride.moving[j]
    numbers[1] = best * correction if best > 0.0 else np.inf  # no weight is of use: nobody is protected
    noise = stride.noise[stride.places[j] :]
    n_pieces = 1 + len(shares)
    i = next_piece(stride, k, MOVE)
    while i < n_pieces:
        if i == 0:
            stride.found.noted[k] = commit_gradients(stride.reading.kept, stride.reading.new)
        else:
            a, b = share_of(stride, i - 1)
            shares[i - 1, 2] = move_along_adam(
                stride.weights[a:b],
                stride.utility[a:b],
                stride.first[a:b],
                stride.second[a:b],
                noise[a:b],
                stride.protect_weights,
                numbers,
            )
        i = after_this(stride, k, MOVE)
    wait_for(stride, k, MOVE, n_pieces)


@compiled
def share_of(stride, i):  # type: ignore[no-untyped-def]
    return i * SHARE, min((i + 1) * SHARE, len(stride.weights))


@compiled
def place_on_board(stride, k, stage, done):  # type: ignore[no-untyped-def]
    return stride.found.board.ctypes.data + 8 * (2 * (N_STAGES * k + stage) + done)


@compiled
def next_piece(stride, k, stage):  # type: ignore[no-untyped-def]
    return add_one(place_on_board(stride, k, stage, 0))


@compiled
def after_this(stride, k, stage):  # type: ignore[no-untyped-def]
    """The next piece, when one is done."""
    add_one(place_on_board(stride, k, stage, 1))
    return next_piece(stride, k, stage)


@compiled
def wait_for(stride, k, stage, n_pieces):  # type: ignore[no-untyped-def]
    while latest(place_on_board(stride, k, stage, 1)) < n_pieces:
        pass
