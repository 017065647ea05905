"""A step of the UPGD family, and how noisy gradients are: in torch, for any device and type."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import inf, sqrt
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]
Bools = NDArray[np.bool_]


class StepNumbers(NamedTuple):
    """The numbers of a parameter's group in one step."""

    rate: float
    decay: float  # what the weights are multiplied with
    l2: float  # weight decay that enters the gradient
    sigma: float  # size and sign of the noise
    beta_utility: float
    beta1: float
    beta2: float
    eps: float
    step: float  # steps of this parameter, with this one


class GatedPart(NamedTuple):
    """One parameter in a gated step; tensors have its shape. Without moments the direction is the gradient."""

    weights: Tensor
    gradient: Tensor
    utility: Tensor  # running average of -g w, without bias correction
    first: Tensor | None  # Adam's moments, without bias correction
    second: Tensor | None
    noise: Tensor | None  # standard normal, (number of weights,)
    numbers: StepNumbers


@torch.no_grad()
def gated_step(
    parts: Sequence[GatedPart], *, minmax: bool, protect_weights: bool, adaptive_noise: bool, finite_only: bool
) -> float | None:
    """One step of the UPGD family, in place: w <- decay w - rate gate (d + sigma noise).

    d is the gradient g, or Adam's direction m / (sqrt(v) + eps). With u = average of -g w, bias-corrected, the gate is
    2 (1 - sigmoid(u / max u)), and exactly 1 where no u is positive; `minmax` centres it between min u and max u. The
    extremes are those of all parts.

    protect_weights: gate the whole step; otherwise the noise only
    adaptive_noise:  noise in units of the root mean square of d over all parts
    finite_only:     leave everything as it is, and return None, where a number would not be finite afterwards
    returns:         the sum of all gates
    """
    averages = [lerp(part.utility, -part.gradient * part.weights, part.numbers.beta_utility) for part in parts]
    utilities = [
        u / (1.0 - part.numbers.beta_utility**part.numbers.step) for u, part in zip(averages, parts, strict=True)
    ]
    centre, width = gate_range(utilities, minmax)
    moments = [moments_of(part) for part in parts]
    directions = [direction_of(part, *new) for part, new in zip(parts, moments, strict=True)]
    unit = root_mean_square(directions) if adaptive_noise else 1.0

    weights, total = [], 0.0
    for part, utility, direction in zip(parts, utilities, directions, strict=True):
        numbers = part.numbers
        gate = 2.0 * torch.sigmoid(-(utility - centre) / width)
        step = gate * direction if protect_weights else direction
        if part.noise is not None:
            step = step + gate * (numbers.sigma * unit * part.noise.view_as(direction))
        weights.append(numbers.decay * part.weights - numbers.rate * step)
        total += float(gate.sum(dtype=torch.float64))

    new = [(w, u, *m) for w, u, m in zip(weights, averages, moments, strict=True)]
    if finite_only and not all(bool(value.isfinite().all()) for values in new for value in values if value is not None):
        return None
    for part, values in zip(parts, new, strict=True):
        for own, value in zip((part.weights, part.utility, part.first, part.second), values, strict=True):
            if own is not None and value is not None:
                own.copy_(value)
    return total


def lerp(average: Tensor, newest: Tensor, beta: float) -> Tensor:
    return torch.lerp(average, newest, 1.0 - beta)


def gate_range(utilities: Sequence[Tensor], minmax: bool) -> tuple[float, float]:
    """Centre and width of the gate's argument; an infinite width switches the gate off: exactly 1."""
    low = min(float(utility.min()) for utility in utilities)
    high = max(float(utility.max()) for utility in utilities)
    if not minmax:
        return 0.0, high if high > 0.0 else inf  # no weight is of use: none is protected
    # utilities that differ by rounding alone are equal, whatever their size
    rounding = 8 * max(torch.finfo(utility.dtype).eps for utility in utilities) * max(abs(high), abs(low))
    return (high + low) / 2, (high - low) / 2 if high - low > rounding else inf


def moments_of(part: GatedPart) -> tuple[Tensor | None, Tensor | None]:
    """Adam's moments with the newest gradient, to which weight decay is added."""
    if part.first is None or part.second is None:
        return None, None
    gradient = part.gradient + part.numbers.l2 * part.weights
    return lerp(part.first, gradient, part.numbers.beta1), lerp(part.second, gradient.square(), part.numbers.beta2)


def direction_of(part: GatedPart, first: Tensor | None, second: Tensor | None) -> Tensor:
    """Where the base optimizer would go, per unit of its rate: the gradient, or Adam's bias-corrected direction."""
    if first is None or second is None:
        return part.gradient
    numbers = part.numbers
    correction1, correction2 = 1.0 - numbers.beta1**numbers.step, 1.0 - numbers.beta2**numbers.step
    direction: Tensor = (first / correction1) / ((second / correction2).sqrt() + numbers.eps)
    return direction


def root_mean_square(values: Sequence[Tensor]) -> float:
    """Over all elements of all tensors: independent of how they are cut into tensors."""
    power = sum(float(value.double().square().sum()) for value in values)
    return sqrt(power / sum(value.numel() for value in values))


@torch.no_grad()
def noise_size(parts: Sequence[GatedPart]) -> float:
    """The unit of adaptive noise: the root mean square of the direction that a step of these parts would take."""
    return root_mean_square([direction_of(part, *moments_of(part)) for part in parts])


def squared_norms(values: Tensor, cuts: Int64s) -> list[float]:
    """Sum of squares of every span of a flat tensor, in double precision; span k goes from cuts[k] to cuts[k + 1]."""
    return [float(values[a:b].double().square().sum()) for a, b in pairwise(cuts)]


def observe_gradient(
    gradient: Tensor, places: Tensor, lengths: Int64s, seen: Bools, beta: float, mean: Tensor, kept: Float64s
) -> tuple[Tensor, Float64s]:
    """What averages over time of a gradient's observed elements become with the newest one.

    gradient: (P,)   places: (E,) of the observed elements, tensor after tensor   lengths: (K,) how many of each tensor
    seen:     (K,) False for a tensor of which nothing changes, whatever its gradient
    mean:     (E,) average of the observed elements, bias-corrected as all averages
    kept:     (3, K) average sum of squares of the gradient, sum of squares of the mean, number of observations
    returns:  mean and kept
    """
    power, _, count = kept
    weights = np.where(seen, (1.0 - beta) / (1.0 - beta ** (count + 1.0)), 0.0)  # of the newest in each average
    counts = torch.from_numpy(lengths).to(gradient.device)
    newest = torch.from_numpy(weights).to(mean.device, mean.dtype).repeat_interleave(counts)
    observed = torch.where(newest > 0, gradient[places].to(mean.dtype), mean)
    new_mean = torch.lerp(mean, observed, newest)
    squares = torch.stack([observed.double().square(), new_mean.double().square()], dim=1)
    new_power, new_signal = torch.segment_reduce(squares, "sum", lengths=counts).cpu().numpy().T
    moved = np.stack([power + weights * (new_power - power), new_signal, count + 1.0])
    return new_mean, np.where(seen, moved, kept)
