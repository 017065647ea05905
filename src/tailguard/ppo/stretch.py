"""A stretch of the flat parameter vector that compiled loops read and differentiate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tailguard.optim.flat import ParameterVector
from tailguard.policy.products import Array
from tailguard.policy.trunk_layout import aligned_zeros


class Stretch:
    """Parameters that lie one after another, and a gradient of theirs for every lane; without parameters, nothing."""

    def __init__(self, vector: ParameterVector, parameters: Sequence[Tensor], n_lanes: int) -> None:
        spans = [vector.where(parameter) for parameter in parameters] or [slice(0, 0)]
        self.vector, self.parameters = vector, parameters
        self.start, self.stop = spans[0].start, spans[-1].stop
        self.gradients = tuple(aligned_zeros(self.stop - self.start) for _ in range(n_lanes))
        flat, gathered = (vector.flat.detach(), vector.gradient) if parameters else (torch.zeros(0), torch.zeros(0))
        self.weights: Array = flat.numpy()[self.start : self.stop]  # (P,) as they are at any time
        self.result: Array = gathered.numpy()[self.start : self.stop]  # where their gradient goes

    def begins(self, parameter: Tensor) -> int:
        """Where a parameter lies in the stretch."""
        return int(self.vector.where(parameter).start - self.start)

    @property
    def free(self) -> bool:
        """No parameter is frozen, or has a hook: hooks are torch's, and only torch would call them."""
        return all(
            parameter.requires_grad and not parameter._backward_hooks and not parameter._post_accumulate_grad_hooks
            for parameter in self.parameters
        )

    def announce(self) -> bool:
        """There will be a gradient; returns whether one is there already."""
        return bool(self.parameters) and self.vector.mark_written(self.start, self.stop)
