"""Taking optimizer steps back: a step may leave the range of float32 although its gradient was finite.

A rate of 1e39, an eps of zero beside a gradient of zero, or noise without bounds do that. Copies cost about a hundredth
of the gradient that a step follows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tailguard.optim.flat import ParameterVector
from tailguard.optim.gating import GatedOptimizer
from tailguard.optim.gradient_scaler import VarianceGradientScaler


class StepGuard:
    """Weights, moments and noise statistics as they are now, to be put back when the next steps go wrong."""

    def __init__(self, optimizer: Optimizer, scaler: VarianceGradientScaler, vector: ParameterVector) -> None:
        self.optimizer, self.scaler, self.flat = optimizer, scaler, vector.flat
        self.weights = vector.flat.detach().clone()
        self.moments = {name: copied(value) for name, value in optimizer.state.get(vector.flat, {}).items()}
        self.noise = optimizer.noise.generator.get_state() if isinstance(optimizer, GatedOptimizer) else None
        statistics = scaler.statistics
        self.seen = scaler.step_count, statistics.kept.copy(), statistics.mean.clone()

    @torch.no_grad()
    def holds(self) -> bool:
        """Whether weights and moments are finite."""
        kept = [value for value in self.optimizer.state.get(self.flat, {}).values() if isinstance(value, Tensor)]
        return all(map(is_finite, (self.flat, *kept)))

    @torch.no_grad()
    def undo(self) -> None:
        """As if no step had been taken; state that was not there yet goes again."""
        self.flat.copy_(self.weights)
        if not self.moments:
            self.optimizer.state.pop(self.flat, None)
        for name, value in self.moments.items():
            if isinstance(value, Tensor):
                self.optimizer.state[self.flat][name].copy_(value)
            else:
                self.optimizer.state[self.flat][name] = value
        if self.noise is not None and isinstance(self.optimizer, GatedOptimizer):
            self.optimizer.noise.generator.set_state(self.noise)
        statistics = self.scaler.statistics
        self.scaler.step_count, statistics.kept[:], statistics.pending, statistics._ratio = *self.seen[:2], False, None
        statistics.mean.copy_(self.seen[2])


def copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def is_finite(values: Tensor) -> bool:
    """A sum is quick to make, and finite where nothing in it is not; only one that is not is looked into."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
