"""Room for compiled loops that is used again: making it anew would cost as much as a small rollout's arithmetic."""

from __future__ import annotations

import threading

from tailguard.policy.trunk_kernel import Room, room_for
from tailguard.policy.trunk_layout import Shape

MOST_ROOMS = 8


class Rooms(threading.local):
    """Each thread's own. What lies in a room means nothing to the next who asks for it."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, ...], Room] = {}

    def of(self, shape: Shape, n_steps: int, size: int) -> Room:
        """Made once; only the latest sizes are kept."""
        layers = (int(extent) for extent in shape.dense[:, 2:].flat)
        key = (n_steps, size, shape.n_layers, shape.n_units, shape.n_inputs, *layers)
        if key not in self.made:
            if len(self.made) >= MOST_ROOMS:
                self.made.clear()
            self.made[key] = room_for(shape, n_steps, size)
        return self.made[key]
