"""The adversary of a training: nobody by default, a penalty on how much an attack could change, or attacked batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from tailguard.adversary.ball import Ball, attackable_features, feature_sizes, observation_bounds
from tailguard.adversary.config import AdversaryConfig
from tailguard.adversary.search import Scene, frozen, worst_case
from tailguard.health import metrics
from tailguard.health.metrics import Metric
from tailguard.losses import masked_mean
from tailguard.normalization import ObservationStatistics
from tailguard.policy import RecurrentPolicy
from tailguard.stateful import Stateful, require_keys


class Adversary:
    """Nobody attacks: observations pass as they are, the loss stays what it is, nothing is remembered."""

    idle: ClassVar[bool] = True
    """Whether the actor's loss is what it is without an adversary."""

    def begin(self, n_updates: int, fresh: bool, env: VecEnv) -> None:
        """When `learn` starts: the length of the schedule, and which features the environment lets be attacked."""

    def face(self, space: spaces.Space[Any], statistics: ObservationStatistics) -> None:
        """Before an update: the bounds of what the policy can see, which move with the observation statistics."""

    def perturb(self, policy: RecurrentPolicy, scene: Scene) -> tuple[Tensor, Tensor]:
        """What the actor is shown (L, B, F), and which of its steps (L, B) are as they were when it acted."""
        return scene.observations, scene.valid

    def harden(self, loss: Tensor, policy: RecurrentPolicy, scene: Scene, parameters: Tensor) -> Tensor:
        """The actor's loss with what robustness adds. parameters: (L, B, P) of the action law on clean observations."""
        return loss

    def update(self) -> Mapping[Metric, float]:
        """After an update: move the schedule; returns what is worth logging."""
        return {}

    def parts(self) -> dict[str, Stateful]:
        """What of it is saved with the agent."""
        return {}


class Attacker(Adversary):
    """What both modes share: the ball, its schedule, its randomness."""

    idle = False

    def __init__(self, config: AdversaryConfig, n_features: int, generator: torch.Generator) -> None:
        self.config, self.n_features, self.generator = config, n_features, generator
        self.n_done, self.n_updates = 0, 0  # of the schedule
        self.sizes = feature_sizes(n_features, config.scales, config.spare, None)
        self.bounds: tuple[Tensor, Tensor] | None = None
        self.divergence, self.n_batches = 0.0, 0

    @property
    def epsilon(self) -> float:
        """Size of the perturbation in this update: a function of the progress alone, so nothing compounds."""
        rising = self.config.ramp * self.n_updates
        return self.config.epsilon * (min((self.n_done + 1) / rising, 1.0) if rising > 0.0 else 1.0)

    @property
    def ball(self) -> Ball:
        """Of this update."""
        sizes = torch.from_numpy((self.epsilon * self.sizes).astype(np.float32))
        return Ball(sizes, self.config.norm).within(self.bounds)

    def begin(self, n_updates: int, fresh: bool, env: VecEnv) -> None:
        self.n_updates, self.n_done = n_updates, 0 if fresh else self.n_done
        self.sizes = feature_sizes(self.n_features, self.config.scales, self.config.spare, attackable_features(env))

    def face(self, space: spaces.Space[Any], statistics: ObservationStatistics) -> None:
        found = observation_bounds(space, statistics)
        self.bounds = None if found is None else (torch.from_numpy(found[0]), torch.from_numpy(found[1]))

    def attacked(self, policy: RecurrentPolicy, scene: Scene, clean: Tensor) -> Tensor:
        """Observations (L, B, F) on which the action law is furthest from `clean` (L, B, P)."""
        head, target = policy.action_head, clean.detach()

        def divergence(observations: Tensor) -> Tensor:
            return head.divergence(target, scene.parameters(policy, observations))

        with frozen(policy.actor, head):
            return worst_case(divergence, scene, self.ball, self.config.search, self.generator)

    def note(self, divergence: Tensor) -> None:
        """Remember what one batch's attack achieved, for the log."""
        self.divergence += float(divergence.detach())
        self.n_batches += 1

    def update(self) -> Mapping[Metric, float]:
        figures = {metrics.ADVERSARY_EPSILON: self.epsilon}
        if self.n_batches:
            figures[metrics.ADVERSARY_DIVERGENCE] = self.divergence / self.n_batches
        self.n_done += 1
        self.divergence, self.n_batches = 0.0, 0
        return figures

    def parts(self) -> dict[str, Stateful]:
        return {"adversary": self}

    def state_dict(self) -> dict[str, Any]:
        return {"n_done": self.n_done, "n_updates": self.n_updates, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_keys(self, state)
        self.n_done, self.n_updates = int(state["n_done"]), int(state["n_updates"])
        self.generator.set_state(state["generator"])


class Regulariser(Attacker):
    """L(clean) + weight * mean over steps of the largest KL(pi(s) || pi(s + d)), with gradient through both laws."""

    def harden(self, loss: Tensor, policy: RecurrentPolicy, scene: Scene, parameters: Tensor) -> Tensor:
        if self.config.weight == 0.0 or self.config.epsilon == 0.0:
            return loss
        observations = self.attacked(policy, scene, parameters)
        perturbed = scene.parameters(policy, observations)
        distance = policy.action_head.divergence(parameters, perturbed, detach_spread=self.config.detach_std)
        penalty = masked_mean(distance, scene.valid)
        self.note(penalty)
        return loss + self.config.weight * penalty


class Mixed(Attacker):
    """A share of every batch's sequences is shown to the actor under attack; all samples weigh the same.

    The critics go on seeing what happened: they judge rollouts that were collected without an attack.
    """

    def perturb(self, policy: RecurrentPolicy, scene: Scene) -> tuple[Tensor, Tensor]:
        chosen = self.chosen(scene.valid.shape[1]).to(scene.valid.device)
        if self.config.epsilon == 0.0 or not bool(chosen.any()):
            return scene.observations, scene.valid
        under_attack = scene._replace(valid=scene.valid & chosen)
        with torch.no_grad():
            clean = scene.parameters(policy, scene.observations)
        observations = self.attacked(policy, under_attack, clean)
        with torch.no_grad():
            reached = policy.action_head.divergence(clean, scene.parameters(policy, observations))
            self.note(masked_mean(reached, under_attack.valid))
        return observations, scene.valid & ~chosen

    def chosen(self, n_sequences: int) -> Tensor:
        """(B,) which sequences are attacked: a share of them, drawn anew for every batch."""
        order = torch.randperm(n_sequences, generator=self.generator)
        return order < round(self.config.ratio * n_sequences)


def make_adversary(config: AdversaryConfig | None, n_features: int, generator: torch.Generator) -> Adversary:
    """The adversary a config asks for; nobody for None."""
    if config is None:
        return Adversary()
    kind = {"regulariser": Regulariser, "mixed": Mixed}[config.mode]
    return kind(config, n_features, generator)
