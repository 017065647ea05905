"""How an action law's divergence changes with what the actor sees, in compiled loops: most of what an attack computes.

Arrays: L steps, B sequences, F features, W outputs of the head's last layer, P parameters of the law.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tailguard.adversary.search import Scene, Slope
from tailguard.loops import compiled
from tailguard.policy import RecurrentPolicy
from tailguard.policy.action_heads import CategoricalHead, GaussianHead
from tailguard.policy.lstm_kernel import ZERO
from tailguard.policy.packing import packed_for_back, packed_weights
from tailguard.policy.pairs import pull_back
from tailguard.policy.rooms import Rooms
from tailguard.policy.trunk_kernel import Seen, last_out, trunk_backward, trunk_forward
from tailguard.policy.trunk_layout import back_of, weights_of

MOST_SEQUENCES = 16  # at a time, so that their room stays in the cache
ROOMS = Rooms()
NO_SPREAD = np.zeros(0, np.float32)


def divergence_slope(policy: RecurrentPolicy, scene: Scene, target: Tensor) -> Slope | None:
    """Of KL(target || law) with the weights as they are now; None where the loops do not know the actor.

    target: (L, B, P)
    """
    head, actor = policy.action_head, policy.actor
    memory = policy.compiled_actor()
    known = isinstance(head, GaussianHead) or (isinstance(head, CategoricalHead) and not head.ragged)
    if memory is None or not known:
        return None
    shape, flat = weights_of(memory, actor.linear(head.last_layer), actor.activation)
    trunk = shape, flat, packed_weights(shape, flat), packed_for_back(shape, flat)
    hidden, cell, valid, expected = (part.contiguous().numpy() for part in (*scene.state, scene.valid, target))
    starts = np.ascontiguousarray(scene.layout.starts)
    spread = head.log_std.detach().numpy() if isinstance(head, GaussianHead) else NO_SPREAD
    n_choices = head.width if isinstance(head, CategoricalHead) else 0
    room = ROOMS.of(shape, len(starts), min(starts.shape[1], MOST_SEQUENCES))

    def slope(observations: Tensor) -> Tensor:
        x = observations.contiguous().numpy()
        seen, found = Seen(x, starts, hidden, cell, np.arange(x.shape[1])), np.empty_like(x)
        slope_kernel(trunk, room, seen, (expected, spread, n_choices), valid, found)
        return torch.from_numpy(found)

    return slope


@compiled
def slope_kernel(trunk, room, seen, law, valid, found):  # type: ignore[no-untyped-def]
    """Fill the gradient (L, B, F) of what the seen observations are, zero where a step does not count by itself or
    through later ones."""
    shape, flat, packed, back = trunk
    n_steps, size, n_units = room.d_hidden.shape
    n_sequences, rows = seen.starts.shape[1], n_steps * size
    d_x, no_gradient = np.empty((rows, shape.n_inputs), np.float32), np.empty(0, np.float32)
    for low in range(0, n_sequences, size):
        high = min(low + size, n_sequences)
        trunk_forward(shape, flat, packed, room, seen, low, high)
        output, d_output = last_out(shape, room, room.outs), last_out(shape, room, room.d_outs)
        for m in range(rows):
            t, s = m // size, low + m % size
            if s < high and valid[t, s]:
                divergence_row(output[m], law, t, s, d_output[m])
            else:
                d_output[m] = ZERO
        trunk_backward(shape, back, room, no_gradient, False)
        gates = room.gates[0]
        d_gates = gates.reshape(rows, gates.shape[2])[:, : 4 * n_units]
        pull_back(d_gates, back_of(shape, back, shape.n_layers), d_x)
        for m in range(rows):
            if low + m % size < high:
                found[m // size, low + m % size] = d_x[m]


@compiled
def divergence_row(output, law, t, s, d_output):  # type: ignore[no-untyped-def]
    """The gradient (W,) of KL(expected || law of the output) of step t of sequence s.

    law: what is expected (L, B, P), logarithms of a Gaussian's spreads (A,), or choices per action
    """
    expected, log_std, n_choices = law
    if log_std.size:
        for i in range(len(output)):
            d_output[i] = (output[i] - expected[t, s, i]) * np.exp(-(log_std[i] + log_std[i]))
        return
    for first in range(0, len(output), n_choices):
        weights = output[first : first + n_choices]
        largest, total = weights.max(), ZERO
        for weight in weights:
            total += np.exp(weight - largest)
        for k in range(first, first + n_choices):
            d_output[k] = np.exp(output[k] - largest) / total - np.exp(expected[t, s, k])
