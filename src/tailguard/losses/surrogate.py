"""The policy's side of the objective: clipped surrogate and divergence, one number per sample."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tailguard.loops import compiled


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


@compiled
def actor_objective_kernel(  # type: ignore[no-untyped-def]
    log_prob, entropy, old, advantage, valid, weights, count, d_log_prob, d_entropy
):
    """The terms above and their mean's gradients in one pass, for compiled updates.

    log_prob .. valid: (M,); weights: clip range, entropy coefficient, KL coefficient; `count` divides the gradients
    returns: sums of surrogate, entropy, KL and clipped samples, and the largest |log ratio|, over the valid ones
    """
    clip_range, ent_coef, kl_beta = weights
    surrogate = entropies = kl = clipped = largest = 0.0
    for m in range(len(log_prob)):
        d_log_prob[m] = d_entropy[m] = 0.0
        if not valid[m]:
            continue
        log_ratio, gain = np.float64(log_prob[m] - old[m]), np.float64(advantage[m])
        ratio = np.exp(log_ratio)
        bounded = min(max(ratio, 1.0 - clip_range), 1.0 + clip_range)
        pulls = ratio * gain <= bounded * gain  # otherwise the bound is what counts, and it has no slope
        surrogate -= ratio * gain if pulls else bounded * gain
        entropies += entropy[m]
        kl += np.expm1(log_ratio) - log_ratio  # NaN where the ratio is: it reaches the total whatever its weight
        clipped += abs(ratio - 1.0) > clip_range
        largest = max(largest, abs(log_ratio))
        d_log_prob[m] = (kl_beta * (ratio - 1.0) - (ratio * gain if pulls else 0.0)) / count
        d_entropy[m] = -ent_coef / count
    return np.array([surrogate, entropies, kl, clipped, largest])
