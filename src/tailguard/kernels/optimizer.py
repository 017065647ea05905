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
    "observe_gradients",
    "squared_norms",
]


def gated_step(
    parts: Sequence[GatedPart],
    *,
    minmax: bool,
    protect_weights: bool,
    adaptive_noise: bool,
    finite_only: bool,
    n_threads: int = 1,
) -> float | None:
    """One step of the UPGD family, in place (`reference.gated_step` defines it); returns the sum of the gates.

    finite_only: leave everything as it is, and return None, where a number would not be finite afterwards
    n_threads:   at most so many; results do not depend on it

    Native for contiguous float32 parameters on the CPU, where a gate is within 1e-6 of the reference's. A step whose
    numbers could leave float32, judged by the largest that goes in, is left to the reference, which looks at each.
    """
    module = native()
    if module is not None and all(is_native(tensor) for part in parts for tensor in part[:-1]):
        numbers = [part.numbers for part in parts]
        if adaptive_noise:
            unit = reference.noise_size(parts)
            numbers = [own._replace(sigma=unit * own.sigma) for own in numbers]
        arrays = [addresses_of(part) for part in parts]
        gates: float | None = module.gated_step(arrays, numbers, minmax, protect_weights, finite_only, n_threads)
        if gates is not None:
            torch.autograd.graph.increment_version([part.weights for part in parts])  # written behind autograd's back
            return gates
    return reference.gated_step(
        parts,
        minmax=minmax,
        protect_weights=protect_weights,
        adaptive_noise=adaptive_noise,
        finite_only=finite_only,
    )


def is_native(tensor: Tensor | None) -> bool:
    """Whether native loops can read and write a tensor where it lies."""
    return tensor is None or (tensor.dtype is torch.float32 and tensor.is_cpu and tensor.is_contiguous())


def addresses_of(part: GatedPart) -> tuple[int, ...]:
    """Number of weights, then the address of each tensor, 0 for none."""
    size = part.weights.numel()
    if any(tensor is not None and tensor.numel() != size for tensor in part[:-1]):
        raise ValueError(f"A part of a step needs tensors of {size} elements, the size of its parameter.")
    return (size, *(0 if tensor is None else tensor.data_ptr() for tensor in part[:-1]))


def squared_norms(values: Tensor, cuts: Int64s) -> list[float]:
    """Sum of squares of every span of a flat tensor, in double precision; span k goes from cuts[k] to cuts[k + 1]."""
    module = native()
    if module is None or not is_native(values):
        return reference.squared_norms(values, cuts)
    squares: list[float] = module.squared_norms(values.detach().numpy(), cuts)
    return squares


class ObservedBlocks:
    """Which elements of the gradients of K tensors are observed: blocks of each, tensor after tensor."""

    def __init__(self, sizes: Int64s, starts: Int64s, lengths: Int64s, firsts: Int64s) -> None:
        """sizes: (K,) of the tensors; starts, lengths: (B,) of every block in its tensor; firsts: (K + 1,) tensor k has
        blocks firsts[k] to firsts[k + 1]."""
        self.given = sizes, starts, lengths, firsts
        self.sizes = sizes
        self.observed: Int64s = np.diff(np.concatenate([[0], np.cumsum(lengths)])[firsts])  # (K,) elements of each
        begins = np.cumsum(sizes) - sizes
        self.byte_offsets = (4 * begins).astype(np.uint64)
        blocks = np.repeat(begins, np.diff(firsts)) + starts
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        self.places = torch.from_numpy(np.repeat(blocks, lengths) + within)  # (E,) among all elements
        module = native()
        self.native = None if module is None else module.GradientObserver(sizes, starts, lengths, firsts)

    def __reduce__(self) -> tuple[type[ObservedBlocks], tuple[Int64s, ...]]:
        """For copy and pickle, which do not know the native part."""
        return ObservedBlocks, self.given


def observe_gradients(
    gradients: Sequence[Tensor | None],
    blocks: ObservedBlocks,
    beta: float,
    before: tuple[Tensor, Float64s],
    after: tuple[Tensor, Float64s],
    left_out: Sequence[int] = (),
) -> None:
    """Fill in what averages over time of the observed elements become with the newest gradients.

    gradients: of each of the K tensors, or one that holds all of them; nothing changes of a tensor without (None)
    before, after: mean of the observed elements (E,); and (3, K) average sum of squares of the gradient, sum of squares
    of the mean, number of observations
    left_out: tensors of which nothing changes although they have a gradient
    """
    (mean, kept), (new_mean, new_kept) = before, after
    sizes = [int(blocks.sizes.sum())] if len(gradients) == 1 else blocks.sizes.tolist()
    if any(gradient is not None and gradient.numel() != n for gradient, n in zip(gradients, sizes, strict=True)):
        raise ValueError(f"Gradients to observe need {sizes[:8]} elements.")
    if blocks.native is not None and is_native(mean) and all(map(is_native, gradients)):
        addresses = np.array([0 if gradient is None else gradient.data_ptr() for gradient in gradients], np.uint64)
        if len(gradients) == 1 and addresses[0]:
            addresses = addresses + blocks.byte_offsets
        for k in left_out:
            addresses[k] = 0
        blocks.native.observe(addresses, beta, mean.numpy(), kept, new_mean.numpy(), new_kept)
        return
    blocks.places = blocks.places.to(mean.device)
    flat = torch.cat(
        [mean.new_zeros(n) if g is None else g.detach().reshape(-1) for g, n in zip(gradients, sizes, strict=True)]
    )
    seen = np.resize([gradient is not None for gradient in gradients], len(blocks.sizes))
    seen[list(left_out)] = False
    found = reference.observe_gradient(flat, blocks.places, blocks.observed, seen, beta, mean, kept)
    new_mean.copy_(found[0])
    new_kept[:] = found[1]
