"""The gradients of an update by the native core: those of the losses in ppo/update.py, in one call per batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from tailguard.kernels.jobs import ActorJob, CriticJob
from tailguard.kernels.layout import TrunkLayout
from tailguard.kernels.networks import gradients
from tailguard.policy import State
from tailguard.policy.action_heads import CategoricalHead, GaussianHead
from tailguard.policy.native import arrays_of, trunk_layout
from tailguard.ppo.learner import Learner, Schedules
from tailguard.rollout.sequences import Ints, SequenceBatch

FROZEN = "a parameter is frozen or has a hook"


def why_torch_actor(learner: Learner) -> str | None:
    """Why the gradient of the actor's loss comes from torch; None where the native core knows all of it."""
    policy, head = learner.policy, learner.policy.action_head
    reasons = [policy.why_torch_acts()]
    if isinstance(head, GaussianHead) and head.bounds == "squash":
        reasons.append("actions are squashed")
    if not isinstance(head, GaussianHead) and not (isinstance(head, CategoricalHead) and not head.ragged):
        reasons.append("the number of choices differs between actions")
    if not learner.adversary.idle:
        reasons.append("an adversary changes what the actor sees")
    if not (is_free(policy.actor) and is_free(head)):
        reasons.append(FROZEN)
    return next((reason for reason in reasons if reason is not None), None)


def why_torch_critics(learner: Learner) -> str | None:
    """Why the gradients of the critics' losses come from torch; None where the native core knows all of them."""
    policy, risk_value = learner.policy, learner.policy.risk_value
    reasons = [critic.why_torch() for critic in policy.critic_list]
    if risk_value is not None and not risk_value.is_known():
        reasons.append("the risk value was replaced or hooked")
    if learner.config.critic.value_clip is not None:
        reasons.append("value_clip is set")
    if not (is_free(policy.critics) and (risk_value is None or is_free(risk_value))):
        reasons.append(FROZEN)
    return next((reason for reason in reasons if reason is not None), None)


def is_free(module: nn.Module) -> bool:
    """Whether every parameter learns, and nothing but the optimizer sees its gradient."""
    return all(weight.requires_grad and not weight._backward_hooks for weight in module.parameters())


class NativeGradients:
    """Adds gradients of chosen sequences of one rollout to the flat gradient: a `GradientSource` of ppo/update.py.

    Of the actor, of the critics, or of both; losses of the part that is left out are zero.
    """

    def __init__(
        self, learner: Learner, rollout: SequenceBatch, schedules: Schedules, actor: bool = True, critics: bool = True
    ) -> None:
        self.schedules, self.valid, self.n_threads = schedules, rollout.valid.numpy(), learner.n_threads
        policy, vector = learner.policy, learner.vector
        self.gradient = vector.gradient.numpy()
        weights, head, offset = vector.flat.detach().numpy(), policy.action_head, vector.offset
        starts = np.ascontiguousarray(rollout.starts)

        def inputs(layout: TrunkLayout, observations: Tensor, state: State) -> dict[str, Any]:
            hidden, cell = arrays_of(State(*(part.contiguous() for part in state)))
            seen = {"observations": observations.contiguous().numpy(), "hidden": hidden, "cell": cell}
            return {
                "layout": layout,
                "weights": weights,
                "gradient": self.gradient,
                **seen,
                "starts": starts,
                "valid": self.valid,
            }

        self.actors, self.critics = [], []
        if actor:
            layout = trunk_layout(policy.actor, head.last_layer, offset)
            job = ActorJob(
                **inputs(layout, rollout.observations, rollout.actor_state),
                actions=rollout.actions.numpy(),
                log_probs=rollout.log_probs.numpy(),
                advantages=rollout.advantages.numpy(),
                log_std_at=offset(head.log_std) if isinstance(head, GaussianHead) else -1,
                n_choices=(head.width,) * head.action_dim if isinstance(head, CategoricalHead) else (),
                clip_range=schedules.clip_range,
                ent_coef=schedules.ent_coef,
                kl_beta=schedules.kl_beta,
            )
            self.actors.append(job)
        for c, critic in enumerate(policy.critic_list if critics else ()):
            layout = trunk_layout(critic.trunk, critic.head.last_layer, offset)
            risk: dict[str, Any] = {}
            if c == 0 and policy.risk_value is not None:
                risk["risk_layout"] = dense_layout(policy.risk_value.linear, offset)
                risk["risk_observations"] = policy.risk_value.mask(rollout.observations).contiguous().numpy()
                risk["risk"] = rollout.risk.numpy()
            self.critics.append(
                CriticJob(
                    **inputs(layout, critic.mask(rollout.observations), rollout.critic_states[c]),
                    target=rollout.target.numpy(),
                    levels=np.asarray(critic.head.levels, np.float32),
                    kappa=critic.head.config.huber_kappa,
                    **risk,
                )
            )

    def __call__(self, chosen: Ints, share: float) -> list[float]:
        """Add `share` of the gradient of the chosen sequences' mean losses; returns the figures of `LOSSES`."""
        count = int(np.count_nonzero(self.valid[:, chosen]))
        now = self.schedules
        jobs: list[ActorJob | CriticJob] = [*self.actors, *self.critics]
        for job in jobs:
            job.scale = (now.vf_coef if isinstance(job, CriticJob) else 1.0) * share / count
        before = self.gradient.copy() if share < 1.0 else None  # of the micro-batches so far
        if before is not None:
            self.gradient.fill(0.0)
        sums = gradients(jobs, np.ascontiguousarray(chosen, np.int64), self.n_threads)
        if before is not None:
            self.gradient += before
        actor, critics = sums[0] if self.actors else [0.0] * 5, sums[len(self.actors) :]
        surrogate, entropy, kl, clipped = (part / count for part in actor[:4])
        value, risk = (sum(part[i] for part in critics) / count for i in (0, 1))
        loss = surrogate - now.ent_coef * entropy + now.kl_beta * kl + now.vf_coef * (value + risk)
        return [loss, surrogate, value / max(len(critics), 1), entropy, kl, clipped, risk, actor[4]]


def dense_layout(linear: Sequence[nn.Linear], offset: Callable[[Tensor], int]) -> TrunkLayout:
    """Where the weights of linear layers with tanh between them lie."""
    dense = tuple((offset(f.weight), offset(f.bias), f.out_features, f.in_features) for f in linear)
    return TrunkLayout(linear[0].in_features, 0, (), dense, "tanh")
