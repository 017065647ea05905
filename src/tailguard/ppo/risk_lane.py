"""The risk value's loss and gradient in compiled loops, beside the critic whose features it reads (lanes.py)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tailguard.loops import compiled
from tailguard.optim.flat import ParameterVector
from tailguard.policy.lstm_kernel import ZERO
from tailguard.policy.products import Array
from tailguard.policy.risk_value import PERIOD_FEATURES, RiskValue
from tailguard.policy.trunk_kernel import copy_row, dense_backward, dense_forward, out_of
from tailguard.policy.trunk_layout import Shape, aligned_zeros, layers_of, room_for_back, room_for_packed
from tailguard.ppo.stretch import Stretch

NOTHING = np.zeros((0, 0), np.float32)


class RiskDesk(NamedTuple):
    """All that one worker needs to learn a risk value; without weights where there is none."""

    shape: Shape
    weights: Array  # (P,)
    packed: Array  # for the way there, laid out before
    back: Array  # for the way back, also
    gradients: tuple[Array, ...]  # (P,) per lane
    result: Array  # (P,) where their sum goes
    x: Array  # (rows, I) features, observation and period
    d_x: Array  # empty: no gradient goes back to the features
    outs: Array
    d_outs: Array
    observations: Array  # (L, S, F)
    lesson: Array  # (L, S, 3) period and target


class CompiledRiskValue:
    """The risk value, ready for the loops; of nobody, nothing."""

    def __init__(self, risk_value: RiskValue | None, vector: ParameterVector, n_lanes: int, in_pairs: bool) -> None:
        self.stretch = Stretch(vector, [] if risk_value is None else list(risk_value.parameters()), n_lanes)
        layers = [] if risk_value is None else risk_value.linear
        self.shape = layers_of(layers, self.stretch.begins)
        self.packed, self.back = room_for_packed(self.shape), room_for_back(self.shape, in_pairs)

    def desk(self, observations: Array, lesson: Array, n_rows: int) -> RiskDesk:
        """With room for so many samples. lesson: (L, S, 3), or (L, S, 0) where there is no risk value."""
        n_outputs = n_rows * int(self.shape.dense[:, 2].sum())
        x, outs, d_outs = aligned_zeros(n_rows, self.shape.n_inputs), aligned_zeros(n_outputs), aligned_zeros(n_outputs)
        weights = self.stretch.weights, self.packed, self.back
        gradients = self.stretch.gradients, self.stretch.result
        return RiskDesk(self.shape, *weights, *gradients, x, NOTHING, outs, d_outs, observations, lesson)


@compiled
def learn_beside(desk, gradient, features, chosen, counts, factor):  # type: ignore[no-untyped-def]
    """Add to the gradient of half the squared error of the rows that count; returns the sum of their losses.

    chosen: where the sequences lie
    """
    shape, x, lesson = desk.shape, desk.x, desk.lesson
    rows, width, n_observed = len(x), features.shape[1], desk.observations.shape[2]
    size = rows // len(lesson)
    for m in range(rows):
        copy_row(features[m], x[m, :width])
        x[m, width:] = ZERO
        if counts[m]:
            t, s = m // size, chosen[m % size]
            for j in range(n_observed):
                x[m, width + j] = desk.observations[t, s, j]
            for j in range(PERIOD_FEATURES):
                x[m, width + n_observed + j] = lesson[t, s, j]
    dense_forward(shape, desk.weights, desk.packed, x, desk.outs)
    last = len(shape.dense) - 1
    value, d_value = out_of(shape, desk.outs, rows, last), out_of(shape, desk.d_outs, rows, last)
    total = 0.0
    for m in range(rows):
        error = value[m, 0] - lesson[m // size, chosen[m % size], PERIOD_FEATURES] if counts[m] else ZERO
        total += 0.5 * float(error) * float(error)
        d_value[m, 0] = factor * error
    dense_backward(shape, desk.back, x, desk, desk.d_x, gradient)
    return total
