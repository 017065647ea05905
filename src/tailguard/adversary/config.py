"""Settings of the adversary that an agent is trained against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import Field, model_validator

from tailguard.adversary.ball import Norm
from tailguard.adversary.search import Search
from tailguard.configuration import Config, Fraction, NonNegativeFloat, Several, UnitInterval
from tailguard.errors import ConfigError, InertSetting


class AdversaryConfig(Config):
    """Who moves the observations, how far, and what the policy learns from it (docs/robustness.md)."""

    mode: Literal["regulariser", "mixed"] = "regulariser"
    """`regulariser`: weight * the largest KL(pi(s) || pi(s + d)) joins the loss. `mixed`: a share of the sequences is
    shown to the actor with the worst perturbation instead."""
    epsilon: NonNegativeFloat = 0.1
    """Size of the perturbation, in units of the observations the policy sees."""
    ramp: UnitInterval = 0.5
    """Share of the updates over which epsilon grows from zero in a straight line; 0 starts at its full size."""
    weight: NonNegativeFloat = 1.0
    """Of the penalty, with mode `regulariser`."""
    ratio: UnitInterval = 0.5
    """Share of the sequences that are perturbed, with mode `mixed`."""
    detach_std: bool = True
    """The penalty does not move a Gaussian policy's spread; otherwise it could be met by more noise."""
    norm: Norm = "linf"
    """Shape of the ball at every step: each feature by itself (`linf`), or all of them together (`l2`)."""
    scales: tuple[NonNegativeFloat, ...] | None = None
    """Factor on epsilon per feature; 0 spares it. None: 1 where the environment does not say otherwise."""
    spare: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Columns of the observation that cannot be attacked, such as the position or the clock."""
    method: Literal["pgd", "sgld"] = "pgd"
    """Projected gradient ascent, or the same with noise that fades (Langevin dynamics)."""
    steps: Several = 3
    """Gradient steps of the inner maximisation."""
    step_size: Fraction | None = None
    """Of one step, as a share of epsilon; None: 2.5 / steps, at most 1."""
    restarts: Several = 1
    """Random starts; the best of them counts."""

    @model_validator(mode="after")
    def something_can_be_attacked(self) -> AdversaryConfig:
        if self.scales is not None and not any(
            scale > 0.0 for column, scale in enumerate(self.scales) if column not in self.spare
        ):
            raise ConfigError(
                "adversary: scales and spare leave no feature that can be attacked. Give at least one feature a scale "
                "above 0, or switch the adversary off with adversary=None."
            )
        return self

    def inert(self) -> Iterable[InertSetting]:
        if self.mode == "mixed":
            why = 'mode="mixed" adds no penalty, it shows perturbed sequences; set ratio, or use mode="regulariser"'
            yield from self.unread(("weight", "detach_std"), why)
        else:
            why = 'mode="regulariser" perturbs every sequence; set weight, or use mode="mixed"'
            yield from self.unread(("ratio",), why)

    @property
    def search(self) -> Search:
        """How the worst perturbation is looked for."""
        return Search(self.method, self.steps, self.step_size or min(2.5 / self.steps, 1.0), self.restarts)
