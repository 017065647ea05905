"""What an update works on: the networks' parameters, the optimizer, the gradient scaler, and steps that are skipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import Any

import numpy as np
import torch
from torch import nn

from tailguard import kernels
from tailguard.adversary import Adversary
from tailguard.errors import ConfigError, TrainingDivergedError
from tailguard.health import metrics
from tailguard.health.metrics import Metric
from tailguard.kernels.optimizer import squared_norms
from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler, VGSConfig
from tailguard.optim.flat import ParameterVector, rescale_moments
from tailguard.optim.frozen import only_what_learns
from tailguard.optim.gating import GatedOptimizer
from tailguard.optim.undo import StepGuard, is_finite
from tailguard.policy import RecurrentPolicy
from tailguard.ppo.config import PPOConfig

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "upgd": UPGD,
    "adaptive_upgd": AdaptiveUPGD,
    "upgdw": UPGDW,
}


def make_optimizer(config: PPOConfig, vector: ParameterVector, noise: torch.Generator) -> torch.optim.Optimizer:
    """The optimizer a config names, over one flat parameter."""
    kind = OPTIMIZERS[config.optimizer]
    defaults: dict[str, Any] = (
        {"generator": noise} if issubclass(kind, GatedOptimizer) else {"eps": 1e-5, "fused": True}
    )
    try:
        return kind([vector.flat], lr=1.0, **{**defaults, **config.optimizer_kwargs})  # type: ignore[call-arg]
    except ConfigError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"optimizer_kwargs do not fit optimizer={config.optimizer!r}: {error}.") from None


def after_a_step(config: PPOConfig) -> Mapping[str, Any]:
    """What the optimizer of a config keeps of a parameter after a step; refused where it cannot take one."""
    vector = ParameterVector(nn.ParameterList([nn.Parameter(torch.zeros(2))]))
    optimizer = make_optimizer(config, vector, torch.Generator())
    vector.zero_gradients()
    vector.gradient.fill_(1.0)
    try:
        optimizer.step()
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer={config.optimizer!r} cannot take a step with these optimizer_kwargs: {error}."
        ) from None
    kept: Mapping[str, Any] = optimizer.state[vector.flat]
    return kept


@dataclass(frozen=True)
class Schedules:
    """Every scheduled value of one update, read once."""

    learning_rate: float
    clip_range: float
    ent_coef: float
    kl_beta: float
    vf_coef: float
    max_grad_norm: float
    target_kl: float | None


@dataclass
class SkippedSteps:
    """How often a step was not finite: in total and in a row."""

    limit: int
    total: int = 0
    in_a_row: int = 0

    def note(self, reason: str | None) -> None:
        """Count a step that was skipped because this was not finite; None: it was taken."""
        if reason is None:
            self.in_a_row = 0
            return
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            raise TrainingDivergedError(
                f"{self.in_a_row} optimizer steps in a row had a {reason} that is not finite; all were skipped and the "
                "weights are still finite. Lower the learning rate, look for extreme rewards or observations, and go "
                "on from the last checkpoint."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self.in_a_row = int(state["total"]), int(state["in_a_row"])


class Learner:
    """Parameters, optimizer and what goes with a step; `update` (ppo/update.py) uses it."""

    batch_sequences: int
    micro_sequences: int | None

    def __init__(
        self, policy: RecurrentPolicy, config: PPOConfig, noise: torch.Generator, adversary: Adversary
    ) -> None:
        self.policy, self.config, self.adversary = policy, config, adversary
        self.vector = ParameterVector(policy)
        self.optimizer = make_optimizer(config, self.vector, noise)
        if config.optimizer_kwargs:
            after_a_step(config)
        vgs = config.vgs or VGSConfig(enabled=False)  # it always measures
        self.gradient_scaler = VarianceGradientScaler(
            [self.vector.flat], segments=self.vector.sizes, **vgs.model_dump()
        )
        self.n_threads = config.update_threads or kernels.available_cores()
        self.skipped = SkippedSteps(config.max_skipped_steps)
        critics = [self.vector.span(f"critics.{c}.") for c in range(len(policy.critics))]
        cuts = [0, *(critic.start for critic in critics), critics[-1].stop, self.vector.flat.numel()]
        self.cuts = np.array(cuts)  # of actor, critics and the rest
        self.guard = StepGuard()

    def gradient_norms(self) -> list[float]:
        """Norms of the gradients of the actor, of each critic, and of the rest."""
        return [sqrt(square) for square in squared_norms(self.vector.gradient, self.cuts)]

    def critic_norms(self, norms: Sequence[float]) -> Mapping[Metric, float]:
        """Gradient norm of each of two critics that learn, and their ratio when both are alive; nothing of a critic
        alone, and nothing of a frozen one."""
        learns = [any(weight.requires_grad for weight in critic.parameters()) for critic in self.policy.critic_list]
        if len(learns) < 2:
            return {}
        first, second = norms[1:3]
        found = {metrics.CRITIC1_GRAD_NORM: first, metrics.CRITIC2_GRAD_NORM: second}
        found = {metric: norm for (metric, norm), counts in zip(found.items(), learns, strict=True) if counts}
        alive = all(learns) and min(first, second) > 1e-8
        return found | {metrics.CRITICS_GRAD_RATIO: first / second} if alive else found

    def step(self, damping: float) -> bool:
        """Move what learns by one optimizer step, `damping` times as far; False where weights would not stay finite."""
        if isinstance(self.optimizer, GatedOptimizer):
            self.optimizer.n_threads = self.n_threads
        with only_what_learns(self.vector, self.optimizer) as anything:
            return not anything or self.guard.step(self.optimizer, damping)

    def set_learning_rate(self, learning_rate: float) -> None:
        """In every param group: the config's schedule is the one home of the rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def figures(self) -> dict[str, float]:
        """What scaler and optimizer measured, once per update."""
        gates = {metrics.MEAN_GATE.name: self.optimizer.mean_gate} if isinstance(self.optimizer, GatedOptimizer) else {}
        scaler = self.gradient_scaler
        pinned = scaler.config.enabled and scaler.get_scaling_factor() <= scaler.config.min_scaling_factor
        return {**scaler.metrics(), metrics.VGS_PINNED.name: float(pinned), **gates}

    def follow_rescale(self, rescaled: list[tuple[nn.Linear, float, float]]) -> None:
        """Let the optimizer's moments of the critics' last layers follow their change of unit."""
        for layer, factor, _ in rescaled:
            if not (is_finite(layer.weight) and is_finite(layer.bias)):
                raise TrainingDivergedError(
                    f"The size of the returns changed by a factor of {1 / factor if factor else inf:g} in one update, "
                    "and a critic's last layer cannot follow. Scale the rewards or look for a single extreme one, and "
                    "go on from the last checkpoint."
                )
        state = self.optimizer.state.get(self.vector.flat)
        if not state:
            return
        for layer, weight_factor, gradient_factor in rescaled:
            spans = [self.vector.where(parameter) for parameter in (layer.weight, layer.bias)]
            rescale_moments(state, spans, gradient_factor, weight_factor)
