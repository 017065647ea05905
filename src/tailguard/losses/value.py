"""The critics' side of the objective: quantile and categorical losses, one number per sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tailguard.loops import compiled, fused_multiply_add, wide_vectors
from tailguard.losses.risk import cell_masses, levels_for, midpoint_levels

ZERO, HALF, ONE = (np.float32(x) for x in (0.0, 0.5, 1.0))
TINY = np.float32(1e-20)  # a Huber zone narrower than any error: the pinball loss

ValueClipMode = Literal["mean_only", "mean_and_variance", "per_quantile"]


def quantile_huber(quantiles: Tensor, target: Tensor, kappa: float, levels: Sequence[float] | None = None) -> Tensor:
    """Quantile regression loss with a Huber kernel; kappa -> 0 is the pinball loss (docs/algorithm.md, eq. 16).

    quantiles: (..., Q) predictions at the midpoints (i + 1/2)/Q, or at `levels`
    target:    (..., K) samples of the return; K = 1 for a scalar target
    returns:   (...)    one loss per element: the caller masks and averages

    "Distributional RL with Quantile Regression" (2018), eq. 10, divided by kappa.
    """
    grid = midpoint_levels(quantiles.shape[-1]) if levels is None else levels
    tau = torch.tensor(grid, dtype=quantiles.dtype, device=quantiles.device)  # (Q,)
    on_kernel = quantiles.dtype == torch.float32 and quantiles.device.type == "cpu" and not target.requires_grad
    if on_kernel and quantiles.shape[:-1] == target.shape[:-1]:
        return QuantileHuber.apply(quantiles, target, tau, kappa)  # type: ignore[no-any-return,no-untyped-call]
    return quantile_huber_eager(quantiles, target, tau, kappa)


def quantile_huber_eager(quantiles: Tensor, target: Tensor, tau: Tensor, kappa: float) -> Tensor:
    """The definition, with every pair in memory: the oracle of the kernel below and the path of other devices."""
    error = target.unsqueeze(-2) - quantiles.unsqueeze(-1)  # (..., Q, K)
    size = error.abs()
    huber = torch.where(size <= kappa, 0.5 * size.square() / kappa, size - 0.5 * kappa) if kappa > 0 else size
    weight = (tau.unsqueeze(-1) - (error < 0).to(error.dtype)).abs()
    return (weight * huber).mean(-1).sum(-1)


class QuantileHuber(torch.autograd.Function):
    """The same loss with its gradient computed in one pass, no pair kept: tens of times faster on a CPU."""

    @staticmethod
    def forward(ctx: Any, quantiles: Tensor, target: Tensor, tau: Tensor, kappa: float) -> Tensor:
        rows = quantiles.detach().reshape(-1, quantiles.shape[-1]).contiguous().numpy()
        samples = target.detach().reshape(-1, target.shape[-1]).contiguous().numpy()
        loss, gradient = np.empty(len(rows), np.float32), np.empty_like(rows)
        quantile_huber_kernel(rows, samples, tau.numpy(), np.float32(kappa), loss, gradient)
        ctx.save_for_backward(torch.from_numpy(gradient).view_as(quantiles))
        return torch.from_numpy(loss).view(quantiles.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].unsqueeze(-1), None, None, None


@compiled
def quantile_huber_kernel(quantiles, target, tau, kappa, loss, gradient):  # type: ignore[no-untyped-def]
    """Fill loss (M,) and its gradient (M, Q).

    The inner loop runs over quantiles so that it vectorises as it is, and takes four samples at a time, one after the
    other, so that sums are fetched and put back once for four.
    """
    wide_vectors()
    n_rows, n_quantiles = quantiles.shape
    n_samples = target.shape[1]
    fours = n_samples - n_samples % 4
    share = ONE / np.float32(n_samples)
    width = max(kappa, TINY)
    per_level = np.empty(n_quantiles, np.float32)
    for m in range(n_rows):
        for i in range(n_quantiles):
            per_level[i] = gradient[m, i] = ZERO
        for k in range(0, fours, 4):
            a, b, c, d = target[m, k], target[m, k + 1], target[m, k + 2], target[m, k + 3]
            for i in range(n_quantiles):
                q, level = quantiles[m, i], tau[i]
                loss_a, pull_a = huber_pull(a - q, level, width)
                loss_b, pull_b = huber_pull(b - q, level, width)
                loss_c, pull_c = huber_pull(c - q, level, width)
                loss_d, pull_d = huber_pull(d - q, level, width)
                per_level[i] = per_level[i] + loss_a + loss_b + loss_c + loss_d
                gradient[m, i] = gradient[m, i] - pull_a - pull_b - pull_c - pull_d
        for k in range(fours, n_samples):
            sample = target[m, k]
            for i in range(n_quantiles):
                one_loss, pull = huber_pull(sample - quantiles[m, i], tau[i], width)
                per_level[i] += one_loss
                gradient[m, i] -= pull
        total = ZERO
        for i in range(n_quantiles):
            total += per_level[i]
            gradient[m, i] *= share
        loss[m] = total * share


@compiled
def huber_pull(error, level, width):  # type: ignore[no-untyped-def]
    """Loss of one sample at one level, and its slope: the level's weight times Huber's slope."""
    near = min(max(error, -width), width)
    pull = (level if error >= ZERO else ONE - level) * (near * (ONE / width))
    return pull * fused_multiply_add(-HALF, near, error), pull  # half of it is exact, so no bit changes


def clip_quantiles(
    quantiles: Tensor, old: Tensor, clip_range: float, mode: ValueClipMode, levels: Sequence[float] | None = None
) -> Tensor:
    """Predictions moved back to within `clip_range` of the critic's own old ones, all in normalized units (eq. 8).

    quantiles, old: (..., Q) at the midpoints (i + 1/2)/Q, or at `levels`
    returns:        (..., Q)

    `mean_only` shifts the law as a whole; `mean_and_variance` also keeps its spread within the same relative range;
    `per_quantile` bounds each level on its own. Mean and spread are the law's own: each quantile has the mass of its
    cell, which on a grid that is dense in the tail is small there.
    """
    if mode == "per_quantile":
        return old + (quantiles - old).clamp(-clip_range, clip_range)
    masses = torch.as_tensor(cell_masses(levels_for("clip_quantiles", quantiles, levels)), dtype=quantiles.dtype)
    (mean, spread), (old_mean, old_spread) = (moments(law, masses.to(law.device)) for law in (quantiles, old))
    clipped_mean = old_mean + (mean - old_mean).clamp(-clip_range, clip_range)
    if mode == "mean_only":
        return quantiles - mean + clipped_mean
    factor = (spread / old_spread).clamp(1.0 - min(clip_range, 0.9), 1.0 + clip_range) * old_spread
    return clipped_mean + (quantiles - mean) / spread * factor


def moments(quantiles: Tensor, masses: Tensor) -> tuple[Tensor, Tensor]:
    """(..., 1) mean and standard deviation of a law whose quantiles (..., Q) have these masses; the latter above 0."""
    mean = (quantiles @ masses).unsqueeze(-1)
    variance = ((quantiles - mean).square() @ masses).unsqueeze(-1)
    return mean, variance.clamp(min=1e-12).sqrt()


def two_hot(samples: Tensor, support: Tensor) -> Tensor:
    """Mean over samples of the two-atom law that keeps each sample's mean (eq. 17).

    samples: (..., K) in the units of the support; values outside it go to its ends
    support: (Q,) evenly spaced, increasing
    returns: (..., Q) probabilities
    """
    n = support.shape[0]
    position = ((samples - support[0]) / (support[1] - support[0])).clamp(0.0, n - 1.0)
    left = position.floor().clamp(max=n - 2.0)
    share = position - left
    probabilities = samples.new_zeros(*samples.shape[:-1], n)
    probabilities.scatter_add_(-1, left.long(), 1.0 - share)
    probabilities.scatter_add_(-1, left.long() + 1, share)
    return probabilities / samples.shape[-1]


def cross_entropy(logits: Tensor, probabilities: Tensor) -> Tensor:
    """-sum p log softmax(logits).

    logits, probabilities: (..., Q)
    returns:               (...)
    """
    return -(probabilities * torch.log_softmax(logits, -1)).sum(-1)
