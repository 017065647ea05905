"""Steps that leave frozen parameters out: neither weights nor what an optimizer remembers of them move.

Everything lies in one flat parameter, so that an optimizer would move what is frozen by momentum, weight decay or
noise. For the time of a step it is given only what learns, as one shorter parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from tailguard.optim.flat import ParameterVector


@contextmanager
def only_what_learns(vector: ParameterVector, optimizer: Optimizer) -> Iterator[bool]:
    """While it is open, the flat parameter, its gradient and its state are those of what learns; gives whether there
    is anything."""
    frozen = vector.frozen
    if not frozen:
        yield True
        return
    if len(frozen) == len(vector.parameters):
        yield False
        return
    flat, extent = vector.flat, vector.flat.shape
    weights, gradient, state = flat.data, flat.grad, optimizer.state[flat]
    learns = torch.ones(extent, dtype=torch.bool, device=weights.device)
    for i in frozen:
        learns[vector.offsets[i] : vector.offsets[i + 1]] = False
    kept = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.shape == extent}
    flat.data, flat.grad = weights[learns], None
    flat.grad = None if gradient is None else gradient[learns]
    state.update({name: value[learns] for name, value in kept.items()})
    if not state:
        del optimizer.state[flat]  # nothing is remembered before the first step
    short = flat.shape
    try:
        yield True
    finally:
        weights[learns] = flat.data
        flat.data, flat.grad = weights, None
        flat.grad = gradient
        state = optimizer.state.get(flat, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == short:
                whole = kept.get(name, value.new_zeros(extent))
                whole[learns] = value
                state[name] = whole
