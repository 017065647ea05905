"""The policy's side of the objective: clipped surrogate and divergence, one number per sample."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_surrogate(log_ratio: Tensor, advantage: Tensor, clip_range: float) -> Tensor:
    """PPO's pessimistic surrogate as a loss (docs/algorithm.md, eq. 9).

    log_ratio: (...) log pi(a|s) - log pi_old(a|s)
    advantage: (...) normalized advantage of the action taken
    returns:   (...) one loss per element: the caller masks and averages
    """
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1.0 - clip_range, 1.0 + clip_range) * advantage)


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """Non-negative, low-variance estimate of KL(pi_old || pi) from actions of pi_old: (r - 1) - log r (eq. 10).

    log_ratio: (...) log pi(a|s) - log pi_old(a|s)
    returns:   (...)
    """
    return log_ratio.expm1() - log_ratio


def masked_mean(values: Tensor, valid: Tensor) -> Tensor:
    """Mean over the valid elements; zero when there are none.

    values, valid: (...), valid is boolean
    returns:       ()
    """
    return torch.where(valid, values, values.new_zeros(())).sum() / valid.sum().clamp(min=1)
