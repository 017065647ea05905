"""A step that leaves the range of float32 although its gradient was finite is not taken.

A rate of 1e39, an eps of zero beside a gradient of zero, or noise without bounds do that.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from tailguard.optim.gating import GatedOptimizer
from tailguard.optim.gradient_scaler import scaled_step


class StepGuard:
    """Takes optimizer steps, except those after which weights or the optimizer's state would not be finite."""

    def __init__(self) -> None:
        self.copies: dict[Tensor, Tensor] = {}  # kept between steps: fresh memory costs more than copying

    def step(self, optimizer: Optimizer, factor: float = 1.0) -> bool:
        """`scaled_step`; returns whether it was taken. A step that was not taken has changed nothing.

        The UPGD family finds out before it moves; of other optimizers, a copy of weights and state is put back.
        """
        if isinstance(optimizer, GatedOptimizer):
            optimizer.finite_only = True
            try:
                scaled_step(optimizer, factor)
            finally:
                optimizer.finite_only = False
            return optimizer.step_taken
        with torch.no_grad():
            return self._step_or_put_back(optimizer, factor)

    def _step_or_put_back(self, optimizer: Optimizer, factor: float) -> bool:
        states = {param: dict(optimizer.state.get(param, {})) for param in weights_of(optimizer)}
        tensors = tensors_of(optimizer)
        self.copies = {tensor: self._room_for(tensor) for tensor in tensors}
        copies = list(self.copies.values())
        torch._foreach_copy_(copies, tensors)
        scaled_step(optimizer, factor)
        if all(map(is_finite, tensors_of(optimizer))):
            return True
        torch._foreach_copy_(tensors, copies)
        for param, state in states.items():  # without what was not there yet
            optimizer.state.pop(param, None)
            if state:
                optimizer.state[param] = state
        return False

    def _room_for(self, tensor: Tensor) -> Tensor:
        kept = self.copies.get(tensor)
        return torch.empty_like(tensor) if kept is None or kept.shape != tensor.shape else kept


def weights_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """Weights, and what is kept of them between steps."""
    weights = weights_of(optimizer)
    kept = [
        value for param in weights for value in optimizer.state.get(param, {}).values() if isinstance(value, Tensor)
    ]
    return [*weights, *kept]


def is_finite(values: Tensor) -> bool:
    """A sum is quick to make, and finite where nothing in it is not; only one that is not is looked into."""
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())
