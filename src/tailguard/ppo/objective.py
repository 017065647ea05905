"""The objective of one batch of sequences (docs/algorithm.md, eq. 15)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tailguard.losses import clipped_surrogate, kl_estimate, masked_mean
from tailguard.policy import RecurrentPolicy
from tailguard.rollout import SequenceBatch


@dataclass(frozen=True)
class Knobs:
    """Every scheduled value of one update, read once."""

    learning_rate: float
    clip_range: float
    ent_coef: float
    kl_beta: float
    vf_coef: float
    max_grad_norm: float
    target_kl: float | None


@dataclass(frozen=True)
class Losses:
    """Means over one batch's valid samples; only `total` carries a graph."""

    total: Tensor
    policy: Tensor
    value: Tensor
    entropy: Tensor
    kl: Tensor
    clip_fraction: Tensor
    log_ratio_max_abs: Tensor


def ppo_losses(policy: RecurrentPolicy, batch: SequenceBatch, now: Knobs) -> Losses:
    """Surrogate, value losses of every critic, entropy bonus and KL penalty."""
    layout = batch.layout()
    parameters = policy.action_parameters(batch.observations, layout, batch.actor_state)
    log_ratio = policy.action_head.log_prob(parameters, batch.actions) - batch.log_probs
    surrogate = masked_mean(clipped_surrogate(log_ratio, batch.advantages, now.clip_range), batch.valid)
    entropy = masked_mean(policy.action_head.entropy(parameters), batch.valid)
    kl = masked_mean(kl_estimate(log_ratio), batch.valid)

    value = torch.stack(
        [
            masked_mean(critic.head.loss(critic(batch.observations, layout, state), batch.target, old), batch.valid)
            for critic, state, old in zip(policy.critic_list, batch.critic_states, batch.old_quantiles, strict=True)
        ]
    ).sum()

    total = surrogate + now.vf_coef * value - now.ent_coef * entropy + now.kl_beta * kl
    with torch.no_grad():
        outside = ((log_ratio.exp() - 1.0).abs() > now.clip_range).to(log_ratio.dtype)
        largest = torch.where(batch.valid, log_ratio.abs(), 0.0).max()
        return Losses(
            total,
            surrogate.detach(),
            value.detach() / len(policy.critics),
            entropy.detach(),
            kl.detach(),
            masked_mean(outside, batch.valid),
            largest,
        )
