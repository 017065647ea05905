"""Inner maximisation: the worst perturbation of whole sequences, by gradient ascent through the memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from tailguard.adversary.ball import Ball, length_of
from tailguard.policy import Layout, RecurrentPolicy, State

NEAR = 0.05
"""Where an ascent starts, as a share of the ball's radius."""

Objective = Callable[[Tensor], Tensor]
"""Observations (L, B, F) -> what the adversary wants to be large, (L, B)."""

Slope = Callable[[Tensor], Tensor]
"""Observations (L, B, F) -> the gradient (L, B, F) of its sum over valid steps."""


@dataclass(frozen=True)
class Search:
    """How the worst perturbation is looked for."""

    method: Literal["pgd", "sgld"] = "pgd"
    steps: int = 10
    step_size: float = 0.25
    """Share of the ball's radius per step."""
    restarts: int = 1


class Scene(NamedTuple):
    """Whole sequences as the actor meets them; nothing here is changed by an attack."""

    observations: Tensor  # (L, B, F)
    layout: Layout
    state: State  # before the first step
    valid: Tensor  # (L, B) steps that count; the others are left alone

    def parameters(self, policy: RecurrentPolicy, observations: Tensor) -> Tensor:
        """(L, B, P) of the action law when the actor sees these observations instead."""
        return policy.action_parameters(observations, self.layout, self.state)


def worst_case(
    objective: Objective,
    scene: Scene,
    ball: Ball,
    search: Search,
    generator: torch.Generator,
) -> Tensor:
    """Observations (L, B, F) inside the ball at which the objective, summed over valid steps, is largest.

    Restarts compete sequence by sequence, because a step's perturbation changes what the memory holds at later ones.
    """
    best, highest = scene.observations, scene.observations.new_full(scene.valid.shape[1:], -torch.inf)
    for _ in range(search.restarts):
        found = climbed(slope_of(objective, scene.valid), scene, ball, search, generator)
        if search.restarts == 1:
            return found
        with torch.no_grad():
            value = counted(objective(found), scene.valid).sum(0)
        best = torch.where((value > highest).unsqueeze(-1), found, best)
        highest = torch.maximum(value, highest)
    return best


def slope_of(objective: Objective, valid: Tensor) -> Slope:
    """By torch."""

    def slope(observations: Tensor) -> Tensor:
        total = counted(objective(observations.requires_grad_()), valid).sum()
        (gradient,) = torch.autograd.grad(total, observations)
        return gradient

    return slope


def climbed(slope: Slope, scene: Scene, ball: Ball, search: Search, generator: torch.Generator) -> Tensor:
    """One random start and its ascent.

    The divergence from itself has no slope at zero, so the start is near zero, never at it. The first third of steps
    stays there and turns towards the steepest rise; on 11 features and 3 actions a single start so reaches 0.96 of the
    exact maximum on average, without them 0.89.
    """
    alive = scene.valid.unsqueeze(-1) & (ball.sizes > 0.0)
    unit = NEAR * ball.draw(scene.observations.shape, generator) * alive
    for k in range(search.steps):
        unit.requires_grad_()
        moved = ball.moved(scene.observations, unit)
        (gradient,) = torch.autograd.grad(moved, unit, slope(moved.detach()))
        unit = unit.detach()
        if search.method == "sgld":
            gradient = gradient + faded_noise(gradient, k, generator)
        scouting = k < search.steps // 3
        risen = NEAR * gradient / length_of(gradient) if scouting else ball.ascended(unit, gradient, search.step_size)
        unit = risen * alive
    return ball.moved(scene.observations, unit)


def faded_noise(gradient: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Noise as large as the gradient itself at the first step, half of it at the second, and so on."""
    size = gradient.square().mean(-1, keepdim=True).sqrt() / (k + 1)
    return size * torch.randn(gradient.shape, generator=generator).to(gradient)


def counted(values: Tensor, valid: Tensor) -> Tensor:
    """Zero where a step does not count."""
    return torch.where(valid, values, values.new_zeros(()))


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """While attacking: gradients are those of observations, and none of a parameter is computed or touched."""
    learning = [parameter for module in modules for parameter in module.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)
