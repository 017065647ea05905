"""The critics' side of the objective: quantile and categorical losses, one number per sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tailguard.kernels import native
from tailguard.kernels import networks as kernels
from tailguard.losses.risk import cell_masses, levels_for, midpoint_levels

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
    on_cpu = quantiles.dtype == torch.float32 and quantiles.device.type == "cpu" and not target.requires_grad
    if on_cpu and quantiles.shape[:-1] == target.shape[:-1] and native() is not None:
        return QuantileHuber.apply(quantiles, target, tau, kappa)  # type: ignore[no-any-return,no-untyped-call]
    return quantile_huber_pairs(quantiles, target, tau, kappa)


def quantile_huber_pairs(quantiles: Tensor, target: Tensor, tau: Tensor, kappa: float) -> Tensor:
    """The definition of the loss, with every pair of quantile and sample in memory; tau: (Q,) levels."""
    error = target.unsqueeze(-2) - quantiles.unsqueeze(-1)  # (..., Q, K)
    size = error.abs()
    huber = torch.where(size <= kappa, 0.5 * size.square() / kappa, size - 0.5 * kappa) if kappa > 0 else size
    weight = (tau.unsqueeze(-1) - (error < 0).to(error.dtype)).abs()
    return (weight * huber).mean(-1).sum(-1)


class QuantileHuber(torch.autograd.Function):
    """The same loss by the native core, which finds loss and gradient in one pass and keeps no pair."""

    @staticmethod
    def forward(ctx: Any, quantiles: Tensor, target: Tensor, tau: Tensor, kappa: float) -> Tensor:
        rows = quantiles.detach().reshape(-1, quantiles.shape[-1]).contiguous().numpy()
        samples = target.detach().reshape(-1, target.shape[-1]).contiguous().numpy()
        loss, gradient = kernels.quantile_huber(rows, samples, tau.numpy(), kappa)
        ctx.save_for_backward(torch.from_numpy(gradient).view_as(quantiles))
        return torch.from_numpy(loss).view(quantiles.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0].unsqueeze(-1), None, None, None


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
