"""Gradient steps: the order of things is part of the algorithm, so it is written once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isfinite, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tailguard.adversary import Adversary
from tailguard.errors import ConfigError, TrainingDivergedError
from tailguard.health import metrics
from tailguard.health.metrics import Metric
from tailguard.kernels.optimizer import squared_norms
from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD, VarianceGradientScaler, VGSConfig, is_scale_free
from tailguard.optim.flat import ParameterVector, rescale_moments
from tailguard.optim.frozen import only_what_learns
from tailguard.optim.gating import GatedOptimizer
from tailguard.optim.undo import StepGuard, is_finite
from tailguard.policy import RecurrentPolicy
from tailguard.ppo.config import PPOConfig
from tailguard.ppo.gradients import ACTOR, CompiledGradients
from tailguard.ppo.lanes import N_LANES
from tailguard.ppo.objective import ActorFigures, CriticFigures, Knobs, actor_losses, critic_loss
from tailguard.ppo.threads import Threads
from tailguard.rollout.sequences import Choice

Figures = tuple[ActorFigures, list[CriticFigures]]

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
    vector.flat.grad = torch.ones_like(vector.flat)
    try:
        optimizer.step()
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer={config.optimizer!r} cannot take a step with these optimizer_kwargs: {error}."
        ) from None
    kept: Mapping[str, Any] = optimizer.state[vector.flat]
    return kept


@dataclass
class SkippedSteps:
    """How often a step was not finite: in total, in this update, and in a row."""

    limit: int
    total: int = 0
    in_a_row: int = 0

    def note(self, taken: bool, what: str) -> None:
        if taken:
            self.in_a_row = 0
            return
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row >= self.limit:
            raise TrainingDivergedError(
                f"{self.in_a_row} optimizer steps in a row had a {what} that is not finite; all were skipped and the "
                "weights are still finite. Lower the learning rate, look for extreme rewards or observations, and go "
                "on from the last checkpoint."
            )

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total, self.in_a_row = int(state["total"]), int(state["in_a_row"])


class Learner:
    """Parameters, optimizer and what goes with a step."""

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
        self.skipped = SkippedSteps(config.max_skipped_steps)
        self.compiled = CompiledGradients(policy, self.vector, adversary.idle, config.gradient_precision == "bfloat16")
        self.refuse_what_torch_does_not_round()
        self.threads = Threads(config.update_threads, N_LANES * (1 + len(policy.critics)), config.torch_threads)
        critics = [self.vector.span(f"critics.{c}.") for c in range(len(policy.critics))]
        cuts = [0, *(critic.start for critic in critics), critics[-1].stop, self.vector.flat.numel()]
        self.cuts = np.array(cuts)  # of actor, critics and the rest
        self.guard = StepGuard()

    def refuse_what_torch_does_not_round(self) -> None:
        """bfloat16 is a matter of the compiled loops."""
        left_to_torch = set(self.trunks) - set(self.compiled.known)
        asked = {
            "gradient_precision": (self.config.gradient_precision, left_to_torch),
            "critic.precision": (self.config.critic.precision, left_to_torch - {ACTOR}),
        }
        for name, (precision, without) in asked.items():
            if precision != "float32" and without:
                raise ConfigError(
                    f"{name}={precision!r} is a matter of the compiled loops, and these settings leave some of that "
                    f"work to torch (docs/speed.md says which). Use {name}='float32'."
                )

    def steps(
        self, choices: Sequence[Choice], now: Knobs, micro_sequences: int | None
    ) -> Iterator[Mapping[Metric, float] | None]:
        """One optimizer step on each batch; None for a batch that holds no valid sample, with which none is taken."""
        self.compiled.look(self.policy)
        for choice in choices:
            yield self.step(choice, now, micro_sequences)

    def step(self, choice: Choice, now: Knobs, micro_sequences: int | None) -> Mapping[Metric, float] | None:
        """One optimizer step on a batch, part by part."""
        if choice.n_valid == 0:
            return None
        self.vector.drop_gradients()
        stats: dict[Metric, float] = {}
        for micro in choice.split(micro_sequences):
            share = micro.n_valid / choice.n_valid  # shares sum to one also when one is zero
            if share > 0.0:
                accumulate(stats, *self.backward(micro, now, share), now.vf_coef, share)
        outcome = self.apply_gradients(now, stats[metrics.LOSS])
        return {**stats, **outcome} if outcome[metrics.SKIPPED_STEPS] == 0.0 else outcome

    def backward(self, choice: Choice, now: Knobs, share: float) -> Figures:
        """Add `share` of the gradient of each trunk's loss."""
        return self.differentiate(choice, now, share)

    def differentiate(self, choice: Choice, now: Knobs, share: float) -> Figures:
        """Trunks have no weight in common, so that they need not wait for each other."""
        work = self.compiled.begin([choice], now, share, self.threads.count)
        left = [j for j in self.trunks if j not in work.trunks]
        others = [partial(self.gradient_in_torch, j, choice, now, share) for j in left]
        results = self.threads.run_measured([*others, *work.workers], choice.n_sequences)
        (figures,) = ({**dict(zip(left, results, strict=False)), **known} for known in work.figures())
        return figures[ACTOR], [figures[j] for j in self.trunks if j != ACTOR]

    @property
    def trunks(self) -> range:
        """The actor, then the critics."""
        return range(1 + len(self.policy.critics))

    def gradient_in_torch(self, trunk: int, choice: Choice, now: Knobs, share: float) -> ActorFigures | CriticFigures:
        """What the compiled loops do not know."""
        batch = choice.copy
        if trunk == ACTOR:
            losses = actor_losses(self.policy, batch, batch.layout(), now, self.adversary)
            differentiate_what_learns(losses.total * share)
            return losses.figures()
        loss = critic_loss(self.policy, trunk - 1, batch, batch.layout())
        differentiate_what_learns(loss.total * (now.vf_coef * share))
        return loss.figures()

    def apply_gradients(self, now: Knobs, loss: float) -> Mapping[Metric, float]:
        """Observe, damp, clip, step, commit. A gradient that is not finite changes nothing, and a step to weights that
        are not is taken back."""
        gradient = self.vector.gather_gradients()
        squares = self.squares_of(gradient)
        norm = sqrt(sum(squares))
        taken, reason = isfinite(norm) and isfinite(loss), "gradient" if isfinite(loss) else "loss"
        if taken:
            self.gradient_scaler.statistics.left_out = self.vector.frozen
            factor = self.gradient_scaler.scale_gradients(self.optimizer)  # reads the raw gradient, damps a noisy one,
            left = norm if is_scale_free(self.optimizer) else norm * factor
            if left > now.max_grad_norm:
                gradient.mul_(now.max_grad_norm / left)  # then the whole step is bounded,
            for group in self.optimizer.param_groups:
                group["lr"] = now.learning_rate
            with only_what_learns(self.vector, self.optimizer) as anything:
                guard = StepGuard() if self.vector.frozen else self.guard  # which keeps copies of all
                taken, reason = not anything or guard.step(self.optimizer, factor), "step"  # then it is taken,
        if taken:
            self.gradient_scaler.step()  # and only now the statistics move
        return self.outcome(squares, taken, reason)

    def outcome(self, squares: list[float], taken: bool, reason: str) -> Mapping[Metric, float]:
        """What became of a step; squares: of the norms of actor, critics and the rest; reason: what was not finite."""
        self.skipped.note(taken, reason)
        if not taken:
            return {metrics.SKIPPED_STEPS: 1.0}
        norms = self.without_frozen(critic_norms(*map(sqrt, squares[1:-1])))
        return {metrics.GRAD_NORM: sqrt(sum(squares)), metrics.SKIPPED_STEPS: 0.0, **norms}

    def without_frozen(self, norms: dict[Metric, float]) -> dict[Metric, float]:
        """Norms of critics of which anything learns: nothing is wrong with a frozen one's."""
        critics = zip(self.policy.critic_list, CRITIC_NORMS, strict=False)
        stay = [norm for critic, norm in critics if not any(part.requires_grad for part in critic.parameters())]
        gone = {*stay, metrics.CRITICS_GRAD_RATIO} if stay else set()
        return {metric: norm for metric, norm in norms.items() if metric not in gone}

    def squares_of(self, gradient: Tensor) -> list[float]:
        """Squared norms of actor, critics and the rest."""
        return squared_norms(gradient, self.cuts)

    def figures(self) -> dict[str, float]:
        """What scaler and optimizer have to say, once per update."""
        gates = {metrics.MEAN_GATE.name: self.optimizer.mean_gate} if isinstance(self.optimizer, GatedOptimizer) else {}
        scaler = self.gradient_scaler
        pinned = scaler.config.enabled and scaler.get_scaling_factor() <= scaler.config.min_scaling_factor
        return {**scaler.metrics(), metrics.VGS_PINNED.name: float(pinned), **gates}

    def follow_rescale(self, rescaled: list[tuple[nn.Linear, float, float]]) -> None:
        """Let the optimizer's memory of the critics' last layers follow their change of unit."""
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


CRITIC_NORMS = (metrics.CRITIC1_GRAD_NORM, metrics.CRITIC2_GRAD_NORM)


def differentiate_what_learns(loss: Tensor) -> None:
    """Backward, unless all that the loss depends on is frozen."""
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]


def critic_norms(*norms: float) -> dict[Metric, float]:
    """Gradient norm of each of two critics, and their ratio when both are alive; nothing of a critic alone."""
    if len(norms) < 2:
        return {}
    first, second = norms
    found = {metrics.CRITIC1_GRAD_NORM: first, metrics.CRITIC2_GRAD_NORM: second}
    if min(norms) > 1e-8:
        found[metrics.CRITICS_GRAD_RATIO] = first / second
    return found


def accumulate(
    stats: dict[Metric, float], actor: ActorFigures, critics: list[CriticFigures], vf_coef: float, share: float
) -> None:
    """Add one micro-batch's figures to the batch's means."""
    value, risk_value = (sum(loss[i] for loss in critics) for i in (0, 1))
    figures = {
        metrics.LOSS: actor.total + vf_coef * (value + risk_value),
        metrics.POLICY_LOSS: actor.policy,
        metrics.VALUE_LOSS: value / len(critics),
        metrics.ENTROPY: actor.entropy,
        metrics.KL: actor.kl,
        metrics.CLIP_FRACTION: actor.clip_fraction,
        metrics.RISK_VALUE_LOSS: risk_value,
    }
    for metric, figure in figures.items():
        stats[metric] = stats.get(metric, 0.0) + share * figure
    stats[metrics.FIRST_LOG_RATIO] = max(stats.get(metrics.FIRST_LOG_RATIO, 0.0), actor.log_ratio_max_abs)
