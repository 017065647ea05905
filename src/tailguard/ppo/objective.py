"""The objective of one batch of sequences (docs/algorithm.md, eq. 15).

Actor and critics share no weights, so their losses are terms of a sum whose gradients have nothing in common: each is
a function of its own, and they may run at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, log1p
from typing import NamedTuple

import numpy as np
from torch import Tensor

from tailguard.adversary import Adversary, Scene
from tailguard.losses import clipped_surrogate, kl_estimate, masked_mean
from tailguard.policy import Layout, RecurrentPolicy
from tailguard.rollout import SequenceBatch

NOBODY = Adversary()


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


class ActorFigures(NamedTuple):
    """Means over one batch's valid samples."""

    total: float
    policy: float
    entropy: float
    kl: float
    clip_fraction: float
    log_ratio_max_abs: float


class ActorLosses(NamedTuple):
    """The same from torch; only `total` carries a graph."""

    total: Tensor
    policy: Tensor
    entropy: Tensor
    kl: Tensor
    clip_fraction: float
    log_ratio_max_abs: float

    def figures(self) -> ActorFigures:
        return ActorFigures(*(float(part) for part in (self.total.detach(), *self[1:])))


class CriticFigures(NamedTuple):
    """Means over one batch's valid samples."""

    value: float
    risk_value: float  # zero where nothing learns it


class CriticLoss(NamedTuple):
    """The same from torch."""

    value: Tensor
    risk_value: Tensor

    @property
    def total(self) -> Tensor:
        return self.value + self.risk_value

    def figures(self) -> CriticFigures:
        return CriticFigures(*(float(part.detach()) for part in self))


def actor_losses(
    policy: RecurrentPolicy, batch: SequenceBatch, layout: Layout, now: Knobs, adversary: Adversary = NOBODY
) -> ActorLosses:
    """Surrogate, entropy bonus, KL penalty, and what the adversary adds.

    How far the policy moved is measured where it is shown what it acted on: an attack is not a step of the policy.
    """
    batch = batch.without_invalid()
    scene = Scene(batch.observations, layout, batch.actor_state, batch.valid)
    shown, clean = adversary.perturb(policy, scene)
    parameters = policy.action_parameters(shown, layout, batch.actor_state)
    log_ratio = policy.action_head.log_prob(parameters, batch.actions) - batch.log_probs
    surrogate = masked_mean(clipped_surrogate(log_ratio, batch.advantages, now.clip_range), batch.valid)
    entropy = masked_mean(policy.action_head.entropy(parameters), batch.valid)
    kl = masked_mean(kl_estimate(log_ratio), clean)
    total = surrogate - now.ent_coef * entropy + now.kl_beta * kl
    total = adversary.harden(total, policy, scene, parameters)
    watched = ratio_figures(log_ratio.detach(), clean, now.clip_range)
    return ActorLosses(total, surrogate.detach(), entropy.detach(), kl.detach(), *watched)


def ratio_figures(log_ratio: Tensor, valid: Tensor, clip_range: float) -> tuple[float, float]:
    """(share of samples whose ratio left the clip range, largest |log ratio|), for watching only.

    Both are 0 where nothing is valid: every sequence is under attack. The largest is not a number if one is none.
    """
    low, high = log1p(-clip_range) if clip_range < 1.0 else -inf, log1p(clip_range)
    seen = log_ratio.numpy(force=True)[valid.numpy(force=True)]
    outside = np.count_nonzero((seen > high) | (seen < low))
    return outside / max(seen.size, 1), float(np.abs(seen).max(initial=0.0))


def critic_loss(policy: RecurrentPolicy, c: int, batch: SequenceBatch, layout: Layout) -> CriticLoss:
    """Distance of critic c's law from samples of the return; the first critic's features also serve the risk value."""
    critic, batch = policy.critic_list[c], batch.without_invalid()
    features = critic.features(batch.observations, layout, batch.critic_states[c])
    value = masked_mean(critic.head.loss(critic.head(features), batch.target, batch.old_quantiles[c]), batch.valid)
    if policy.risk_value is None or c > 0:
        return CriticLoss(value, value.new_zeros(()))
    period, target = batch.risk[..., :-1], batch.risk[..., -1]
    error = policy.risk_value(features, batch.observations, period) - target
    return CriticLoss(value, masked_mean(0.5 * error.square(), batch.valid))
