"""A step of the UPGD family, squared norms of spans, and the noise of a gradient, each in one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tailguard.kernels.core import native
from tailguard.kernels.reference import optimizer as reference
from tailguard.kernels.reference.optimizer import Float64s, GatedPart, Int64s, StepNumbers

__all__ = [
    "Float64s",
    "GatedPart",
    "Int64s",
    "ObservedBlocks",
    "StepNumbers",
    "gated_step",
    "observe_gradient",
    "squared_norms",
]


def gated_step(
    parts: Sequence[GatedPart],
    *,
    minmax: bool,
    protect_weights: bool,
    adaptive_noise: bool,
    finite_only: bool,
) -> float | None:
    """One step of the UPGD family, in place (`reference.gated_step` defines it); returns the sum of the gates.

    finite_only: leave everything as it is, and return None, where a number might not be finite afterwards

    Native for contiguous float32 parameters on the CPU, whose gate is within 1e-6 of the reference's. Whether numbers
    stay finite is then judged before the step, by bounds: a weight that could pass 3e38 counts as one that does.
    """
    module = native()
    if module is None or not all(is_native(tensor) for part in parts for tensor in part[:-1]):
        return reference.gated_step(
            parts,
            minmax=minmax,
            protect_weights=protect_weights,
            adaptive_noise=adaptive_noise,
            finite_only=finite_only,
        )
    arrays = [tuple(tensor if tensor is None else tensor.detach().numpy() for tensor in part[:-1]) for part in parts]
    numbers = [part.numbers for part in parts]
    total: float | None = module.gated_step(arrays, numbers, minmax, protect_weights, adaptive_noise, finite_only)
    torch.autograd.graph.increment_version([part.weights for part in parts])  # written behind autograd's back
    return total


def is_native(tensor: Tensor | None) -> bool:
    """Whether native loops can read and write a tensor where it lies."""
    return tensor is None or (tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous())


def squared_norms(values: Tensor, cuts: Int64s) -> list[float]:
    """Sum of squares of every span of a flat tensor, in double precision; span k goes from cuts[k] to cuts[k + 1]."""
    module = native()
    if module is None or not is_native(values):
        return reference.squared_norms(values, cuts)
    squares = np.empty(len(cuts) - 1)
    module.squared_norms(values.detach().numpy(), cuts, squares)
    found: list[float] = squares.tolist()
    return found


class ObservedBlocks:
    """Which elements of a flat gradient are observed: blocks of K tensors, tensor after tensor."""

    def __init__(self, starts: Int64s, lengths: Int64s, firsts: Int64s) -> None:
        """starts, lengths: (B,) of every block in the gradient; firsts: (K + 1,) tensor k has blocks firsts[k] to
        firsts[k + 1]."""
        self.starts, self.lengths, self.firsts = starts, lengths, firsts
        ends = np.concatenate([[0], np.cumsum(lengths)])
        self.sizes: Int64s = np.diff(ends[firsts])  # (K,) observed elements of each tensor
        self.places: Tensor | None = None

    def places_on(self, device: torch.device) -> Tensor:
        """(E,) where the observed elements lie in the gradient."""
        if self.places is None or self.places.device != device:
            before = np.cumsum(self.lengths) - self.lengths
            within = np.arange(self.lengths.sum()) - np.repeat(before, self.lengths)
            self.places = torch.from_numpy(np.repeat(self.starts, self.lengths) + within).to(device)
        return self.places


def observe_gradient(
    gradient: Tensor, blocks: ObservedBlocks, weights: Float64s, mean: Tensor, new_mean: Tensor
) -> tuple[Float64s, Float64s]:
    """Merge a gradient into the running mean of its observed elements.

    gradient: (P,)   weights: (K,) of the newest gradient in the new mean of each tensor
    mean:     (E,) of the observed elements, one after another   new_mean: (E,), filled
    returns:  (K,) sums of squares of the observed gradient, and of the new mean
    """
    module = native()
    if module is None or not all(is_native(tensor) for tensor in (gradient, mean, new_mean)):
        places = blocks.places_on(gradient.device)
        return reference.observe_gradient(gradient, places, blocks.sizes, weights, mean, new_mean)
    power, signal = np.empty_like(weights), np.empty_like(weights)
    arrays = (tensor.numpy() for tensor in (mean, new_mean))
    module.observe_gradient(
        gradient.numpy(), blocks.starts, blocks.lengths, blocks.firsts, weights, *arrays, power, signal
    )
    return power, signal
