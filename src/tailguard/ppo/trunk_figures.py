"""Figures of every trunk apart, once per update: its recurrent state, and what gradient reaches it and its head."""

from __future__ import annotations

import re
from collections import defaultdict
from math import isfinite, sqrt

import numpy as np
import torch

from tailguard.health import metrics
from tailguard.health.metrics import TRUNK_NAMES
from tailguard.optim.flat import ParameterVector
from tailguard.policy import State
from tailguard.rollout.collect import RolloutState

SATURATED, DEAD = 0.99, 1e-6  # of a hidden unit: above the one, or below the other
NO_GRADIENT = 1e-8

_PARAMETER = re.compile(
    r"(?P<actor>actor|action_head)\.(?P<in_actor>.+)|critics\.(?P<critic>\d+)\.(?P<part>trunk|head)\.(?P<in_critic>.+)"
)


def state_figures(live: RolloutState) -> dict[str, float]:
    """Norm, mean and std of hidden states and cells per layer; shares that alerts watch, per trunk and of all units."""
    critics = State(
        torch.cat([state.hidden for state in live.critic_states], 1),
        torch.cat([state.cell for state in live.critic_states], 1),
    )
    figures: dict[str, float] = {}
    for name, state in (("actor", live.actor_state), ("critic", critics)):
        for kind, layers in (("", state.hidden), ("_cell", state.cell)):
            for i, values in enumerate(layers):
                figures |= moments(f"lstm/{name}_layer{i}{kind}", values)
    states = dict(zip(trunk_names(len(live.critic_states)), (live.actor_state, *live.critic_states), strict=True))
    units = torch.cat([state.hidden.flatten() for state in states.values()]).abs()
    if not units.numel():
        return figures
    for trunk, state in states.items():
        layers = state.hidden.abs().flatten(1)  # (layers, N * H)
        figures[metrics.TRUNK_SATURATED_SHARE[trunk].name] = float((layers > SATURATED).float().mean(1).max())
        figures[metrics.TRUNK_DEAD_SHARE[trunk].name] = float((layers < DEAD).float().mean(1).max())
        if state.cell.numel():
            figures[metrics.TRUNK_CELL_MAX[trunk].name] = float(state.cell.abs().max())
    largest = max(figures.get(metric.name, 0.0) for metric in metrics.TRUNK_CELL_MAX.values())
    return figures | {
        metrics.CELL_MAX.name: largest,
        metrics.SATURATED_SHARE.name: int((units > SATURATED).sum()) / units.numel(),
        metrics.DEAD_SHARE.name: int((units < DEAD).sum()) / units.numel(),
    }


def moments(name: str, values: torch.Tensor) -> dict[str, float]:
    """Mean norm over environments, mean and std over all units."""
    return {
        f"{name}_norm": float(values.norm(dim=-1).mean()),
        f"{name}_mean": float(values.mean()),
        f"{name}_std": float(values.std(correction=0)),
    }


def gradient_figures(vector: ParameterVector, grad_norm: float | None) -> dict[str, float]:
    """Gradient norms of every trunk and of its head, and how much reaches the trunk's worst layer.

    grad_norm: of whole gradients, mean over the update's steps; None when none was taken

    Read from the gradient that the last step left in `vector`, scaled so that the whole of it has `grad_norm`: whether
    it was clipped does not matter. A part all of whose parameters are frozen is left out.
    """
    gradient = vector.flat.grad
    if gradient is None or not grad_norm:
        return {}
    squares = np.add.reduceat(np.square(gradient.numpy(force=True), dtype=np.float64), vector.offsets[:-1])
    whole = sqrt(squares.sum())
    if not isfinite(whole) or whole == 0.0:
        return {}
    n_critics = len({name.split(".")[1] for name in vector.names if name.startswith("critics.")})
    figures: dict[str, float] = {}
    for trunk, (layers, head) in squares_by_trunk(vector, squares, n_critics).items():
        norms = {layer: grad_norm * sqrt(square) / whole for layer, square in layers.items()}
        if norms:
            figures[metrics.TRUNK_GRAD_NORM[trunk].name] = sqrt(sum(norm**2 for norm in norms.values()))
        if head is not None:
            of_head = grad_norm * sqrt(head) / whole
            figures[metrics.HEAD_GRAD_NORM[trunk].name] = of_head
            if norms and of_head > NO_GRADIENT:
                figures[metrics.TRUNK_GRAD_SHARE[trunk].name] = min(norms.values()) / of_head
    return figures


def squares_by_trunk(
    vector: ParameterVector, squares: np.ndarray, n_critics: int
) -> dict[str, tuple[dict[str, float], float | None]]:
    """Squared gradient norms of each trunk's layers and of its head, without what is frozen."""
    names = trunk_names(n_critics)
    layers: dict[str, dict[str, float]] = {name: defaultdict(float) for name in names}
    heads: dict[str, float | None] = dict.fromkeys(names)
    for name, parameter, square in zip(vector.names, vector.parameters, squares.tolist(), strict=True):
        found = _PARAMETER.fullmatch(name)
        if found is None or not parameter.requires_grad:
            continue
        trunk = names[0 if found["actor"] else 1 + int(found["critic"])]
        if "head" in (found["actor"] or found["part"]):
            heads[trunk] = (heads[trunk] or 0.0) + square
        else:  # memory.<kind of weight>.<layer>, layers.<layer>.<kind of weight>
            kind, *place = (found["in_actor"] or found["in_critic"]).split(".")
            layers[trunk][f"{kind}.{place[-1] if kind == 'memory' else place[0]}" if place else kind] += square
    return {name: (layers[name], heads[name]) for name in names}


def trunk_names(n_critics: int) -> tuple[str, ...]:
    """Of the actor's trunk, then of the critics': a single critic has no number."""
    actor, single, *twins = TRUNK_NAMES
    return (actor, single) if n_critics == 1 else (actor, *twins)
