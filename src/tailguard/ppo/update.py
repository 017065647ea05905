"""One PPO update: epochs, minibatches, losses, backward, damp, clip, step (docs/algorithm.md, Algorithm 1).

From top to bottom: `update` walks epochs and batches, `batch_loss` is the objective, `take_step` moves the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt

import numpy as np
import torch
from torch import Tensor

from tailguard.adversary import Scene
from tailguard.health import metrics
from tailguard.health.metrics import Metric
from tailguard.losses import clipped_surrogate, kl_estimate, masked_mean
from tailguard.optim import is_scale_free
from tailguard.policy import RecurrentPolicy
from tailguard.ppo.learner import Learner, Schedules
from tailguard.ppo.native_update import NativeGradients, why_torch_actor, why_torch_critics
from tailguard.rollout.sequences import Ints, SequenceBatch, minibatches

GradientSource = Callable[[Ints, float], Sequence[float]]
"""(sequences, share of the batch) -> the figures of `LOSSES`."""


@dataclass
class UpdateStats:
    """What the batches of one update measured: a row of figures for each."""

    rows: list[dict[Metric, float]] = field(default_factory=list)
    last_epoch: int = 0
    """Where the rows of the last epoch that held a valid sample begin."""
    n_epochs: int = 0
    """Epochs that held a valid sample."""
    n_empty_epochs: int = 0

    def means(self) -> dict[Metric, float]:
        """Means over the batches that measured a figure; the divergence is the last epoch's, the first log-ratio that
        of the first batch alone."""
        sums: dict[Metric, float] = {}
        counts: dict[Metric, int] = {}
        for i, row in enumerate(self.rows):
            for metric, value in row.items():
                if (metric is metrics.KL and i < self.last_epoch) or (metric is metrics.FIRST_LOG_RATIO and i > 0):
                    continue
                sums[metric] = sums.get(metric, 0.0) + value
                counts[metric] = counts.get(metric, 0) + 1
        if self.n_empty_epochs:
            sums[metrics.EMPTY_EPOCHS] = counts[metrics.EMPTY_EPOCHS] = self.n_empty_epochs
        return {metric: total / counts[metric] for metric, total in sums.items()}


def update(
    learner: Learner, rollout: SequenceBatch, training: Ints, schedules: Schedules, rng: np.random.Generator
) -> UpdateStats:
    """Improve the policy on the sequences `training` of a rollout, in epochs of shuffled minibatches."""
    stats = UpdateStats()
    add_gradient = gradient_source(learner, rollout, schedules)
    for _ in range(learner.config.n_epochs):
        first_row = len(stats.rows)
        for chosen in minibatches(training, learner.batch_sequences, rng):
            row = batch_gradient(learner, rollout, chosen, add_gradient)
            if row is not None:  # a batch that holds no valid sample takes no step
                stats.rows.append(take_step(learner, schedules, row))
        if len(stats.rows) == first_row:
            stats.n_empty_epochs += 1
            continue
        stats.n_epochs, stats.last_epoch = stats.n_epochs + 1, first_row
        if schedules.target_kl is not None and stats.means().get(metrics.KL, 0.0) > schedules.target_kl:
            break
    return stats


def gradient_source(learner: Learner, rollout: SequenceBatch, schedules: Schedules) -> GradientSource:
    """What adds a share of the gradient of some sequences to `learner.vector` and measures `LOSSES`.

    `batch_loss` defines it; the actor's part and the critics' come from the native core where it knows them.
    """
    actor, critics = why_torch_actor(learner) is not None, why_torch_critics(learner) is not None  # left to torch
    native = None if actor and critics else NativeGradients(learner, rollout, schedules, not actor, not critics)
    if native is not None and not actor and not critics:
        return native

    def by_torch(chosen: Ints, share: float) -> list[float]:
        known = native(chosen, share) if native is not None else [0.0] * len(LOSSES)
        loss, figures = batch_loss(learner, rollout.select(chosen), schedules, actor, critics)
        if loss.requires_grad:  # it does not where every parameter is frozen
            (loss * share).backward()  # type: ignore[no-untyped-call]
        return [a + b for a, b in zip(known, figures, strict=True)]  # each is zero where the other is not

    return by_torch


def batch_gradient(
    learner: Learner, rollout: SequenceBatch, chosen: Ints, add_gradient: GradientSource
) -> dict[Metric, float] | None:
    """Leave the gradient of a batch in `learner.vector`, micro-batch by micro-batch; returns its losses, None where no
    sample is valid."""
    valid = rollout.valid.numpy()
    n_valid = int(np.count_nonzero(valid[:, chosen]))
    if n_valid == 0:
        return None
    learner.vector.zero_gradients()
    row = dict.fromkeys(LOSSES, 0.0)
    for micro in np.array_split(chosen, -(-len(chosen) // (learner.micro_sequences or len(chosen)))):
        share = int(np.count_nonzero(valid[:, micro])) / n_valid  # shares sum to one also when one is zero
        if share > 0.0:
            for metric, figure in zip(LOSSES, add_gradient(micro, share), strict=True):
                largest = metric is metrics.FIRST_LOG_RATIO
                row[metric] = max(row[metric], figure) if largest else row[metric] + share * figure
    return row


def batch_loss(
    learner: Learner, batch: SequenceBatch, schedules: Schedules, actor: bool = True, critics: bool = True
) -> tuple[Tensor, list[float]]:
    """The objective of a batch of sequences (docs/algorithm.md, eq. 15), with its graph, and the figures of `LOSSES`.

    Actor and critics share no weights: their losses are terms of a sum whose gradients have nothing in common, and
    either may be left out.
    """
    batch = batch.without_invalid()
    policy_loss = value = risk = surrogate = entropy = kl = clipped = largest = batch.returns.new_zeros(())
    if actor:
        policy_loss, (surrogate, entropy, kl, clipped, largest) = actor_loss(learner, batch, schedules)
    if critics:
        value, risk = value_losses(learner.policy, batch)
    loss = policy_loss + schedules.vf_coef * (value + risk)
    figures = (loss, surrogate, value / len(learner.policy.critics), entropy, kl, clipped, risk, largest)
    return loss, [float(figure.detach()) for figure in figures]


def actor_loss(learner: Learner, batch: SequenceBatch, schedules: Schedules) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Clipped surrogate, entropy bonus, KL penalty, and what an adversary adds, which is nothing by default (eq. 9-13).

    Also returns surrogate, entropy, KL, the share of clipped ratios, and the largest |log ratio|. The last three are
    measured where the policy is shown what it acted on: an attack is not a step of the policy.
    """
    policy, adversary, head = learner.policy, learner.adversary, learner.policy.action_head
    scene = Scene(batch.observations, batch.layout(), batch.actor_state, batch.valid)
    shown, clean = adversary.perturb(policy, scene)
    parameters = policy.action_parameters(shown, scene.layout, scene.state)
    log_ratio = head.log_prob(parameters, batch.actions) - batch.log_probs
    surrogate = masked_mean(clipped_surrogate(log_ratio, batch.advantages, schedules.clip_range), batch.valid)
    entropy = masked_mean(head.entropy(parameters), batch.valid)
    kl = masked_mean(kl_estimate(log_ratio), clean)
    loss = surrogate - schedules.ent_coef * entropy + schedules.kl_beta * kl
    loss = adversary.harden(loss, policy, scene, parameters)
    ratio = torch.where(clean, log_ratio.detach(), log_ratio.new_zeros(())).exp()
    clipped = ((ratio - 1.0).abs() > schedules.clip_range).sum() / clean.sum().clamp(min=1)
    return loss, (surrogate, entropy, kl, clipped, ratio.log().abs().max())


def value_losses(policy: RecurrentPolicy, batch: SequenceBatch) -> tuple[Tensor, Tensor]:
    """Distance of every critic's quantiles from the same samples of the return, summed over critics (eq. 6-8), and the
    squared error of the risk value, which reads the first critic's features."""
    value = risk = batch.returns.new_zeros(())
    for c, critic in enumerate(policy.critic_list):
        features = critic.features(batch.observations, batch.layout(), batch.critic_states[c])
        errors = critic.head.loss(critic.head(features), batch.target, batch.old_quantiles[c])
        value = value + masked_mean(errors, batch.valid)
        if c == 0 and policy.risk_value is not None:
            predicted = policy.risk_value(features, batch.observations, batch.risk[..., :-1])
            risk = masked_mean(0.5 * (predicted - batch.risk[..., -1]).square(), batch.valid)
    return value, risk


LOSSES = (
    metrics.LOSS,
    metrics.POLICY_LOSS,
    metrics.VALUE_LOSS,
    metrics.ENTROPY,
    metrics.KL,
    metrics.CLIP_FRACTION,
    metrics.RISK_VALUE_LOSS,
    metrics.FIRST_LOG_RATIO,
)
"""What `batch_loss` measures, in its order: means over valid samples, and the largest |log ratio|."""


def take_step(learner: Learner, schedules: Schedules, row: dict[Metric, float]) -> dict[Metric, float]:
    """Damp a noisy gradient, bound the step, move (eq. 15-17): the order is part of the algorithm.

    `row` holds the losses whose gradient is in `learner.vector`; returns it with what the step measured. A loss or a
    gradient that is not finite changes nothing, and a step to weights that are not finite is taken back.
    """
    optimizer, scaler = learner.optimizer, learner.gradient_scaler
    norms = learner.gradient_norms()  # of the actor, each critic, and the rest
    norm = sqrt(sum(part * part for part in norms))
    reason = "loss" if not isfinite(row[metrics.LOSS]) else "gradient" if not isfinite(norm) else None
    if reason is None:
        scaler.statistics.left_out = learner.vector.frozen
        damping = scaler.scale_gradients(optimizer)  # reads the raw gradient; damps it, or else the step
        bounded = norm if is_scale_free(optimizer) else norm * damping
        if bounded > schedules.max_grad_norm:
            learner.vector.gradient.mul_(schedules.max_grad_norm / bounded)
        learner.set_learning_rate(schedules.learning_rate)
        if learner.step(damping):
            scaler.step()  # only now the statistics move
        else:
            reason = "step"  # to weights that are not finite: it was not taken
    learner.skipped.note(reason)
    if reason is not None:
        return {metrics.SKIPPED_STEPS: 1.0}
    return {**row, metrics.GRAD_NORM: norm, metrics.SKIPPED_STEPS: 0.0, **learner.critic_norms(norms)}
