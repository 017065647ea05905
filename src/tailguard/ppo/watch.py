"""Figures of one update that are measured once, after it: nothing here touches a training graph."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from math import isfinite, sqrt
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tailguard.health import metrics
from tailguard.health.metrics import TRUNK_NAMES, Metric
from tailguard.losses.calibration import coverage, coverage_error, realised_cvar
from tailguard.losses.risk import cvar_weights, interpolation_weights
from tailguard.normalization import Affine
from tailguard.optim.flat import ParameterVector
from tailguard.policy import RecurrentPolicy, State
from tailguard.policy.action_heads import GaussianHead
from tailguard.ppo.config import PPOConfig
from tailguard.rollout import RolloutBuffer, SequenceBatch
from tailguard.rollout.collect import RolloutState
from tailguard.rollout.evaluate import sequence_quantiles
from tailguard.rollout.targets import realised_returns

N_WATCHED = 2_048  # samples of a rollout that figures of whole laws are taken from: shares are known to a percent
SAME = 0.02  # of the spread of a rollout's returns: on which side of a quantile so near an outcome lies means nothing
NO_SPREAD = 0.02  # of the return scale: an agent that has stopped acting has one return, and no quantile can follow it


@torch.no_grad()
def explained_variance(policy: RecurrentPolicy, reserved: SequenceBatch, scale: Affine) -> float | None:
    """1 - Var[return - value] / Var[return] on sequences no gradient has seen; None when no sample is valid."""
    valid = reserved.valid
    if int(valid.sum()) < 2:
        return None
    laws = [
        sequence_quantiles(critic, reserved.observations, reserved.starts, state)
        for critic, state in zip(policy.critic_list, reserved.critic_states, strict=True)
    ]
    values = scale.mean + scale.std * (policy.aggregate(laws) @ policy.masses)
    returns = reserved.returns[valid].double()
    variance = float(returns.var(correction=0))
    if variance == 0.0:
        return None
    explained = 1.0 - float((returns - values[valid].double()).var(correction=0)) / variance
    return explained if isfinite(explained) else None  # returns that differ by next to nothing


def rollout_figures(policy: RecurrentPolicy, buffer: RolloutBuffer, scale: Affine) -> Mapping[Metric, float]:
    """What the buffer says about critics and policy, on valid samples; on all of them where none is."""
    figures = {}
    steps = watched_steps(buffer)
    quantiles, actions = buffer.quantiles[:, steps], buffer.actions  # (C, S, N, Q), (T, N, A)
    if not buffer.valid.all() and buffer.valid[steps].any():
        quantiles, actions = quantiles[:, buffer.valid[steps]], actions[buffer.valid]
    of_samples = tuple(range(actions.ndim - 1))
    if quantiles.shape[-1] > 1:
        figures[metrics.QUANTILE_CROSSING] = float((np.diff(quantiles, axis=-1) < 0).mean())
    if len(quantiles) == 2:
        means = quantiles @ policy.masses.numpy(force=True)
        figures[metrics.TWIN_GAP] = float(np.abs(means[0] - means[1]).mean()) / scale.std
    if isinstance(policy.action_head, GaussianHead):
        figures[metrics.STD] = float(policy.action_head.log_std.detach().exp().mean())
        sent = np.tanh(actions) if policy.action_head.bounds == "squash" else actions.clip(-1.0, 1.0)
        figures[metrics.ACTION_SATURATION] = float((np.abs(sent) >= 0.999).all(-1).mean())
        figures[metrics.ACTION_SPREAD] = float(sent.std(of_samples).max())
    else:
        figures[metrics.ACTION_SPREAD] = float(actions.std(of_samples).max())
    return figures


def watched_steps(buffer: RolloutBuffer) -> slice:
    """Every so many steps of all environments: watching must stay cheap beside learning (benchmarks/health_cost.py)."""
    return slice(None, None, max(buffer.n_steps * buffer.n_envs // N_WATCHED, 1))


def calibration_figures(buffer: RolloutBuffer, config: PPOConfig, scale: Affine) -> Mapping[Metric, float]:
    """Are the quantiles predicted before the rollout those of what then happened?

    Predictions were made with weights that had not seen the rollout, so they are out of sample; of what comes after the
    rollout there is only the critics' own word.

    Errors are judged in units of this rollout's own spread: the return scale may remember larger returns.
    """
    levels, alpha = config.critic.levels, config.risk.alpha
    if len(levels) < 2 or not buffer.valid.any():
        return {}
    realised = realised_returns(buffer.rewards, buffer.law, buffer.terminal_law, buffer.dones, config.gamma, levels)
    steps = watched_steps(buffer)
    if not buffer.valid[steps].any():
        steps = slice(None)
    valid = buffer.valid[steps]
    law, realised = buffer.law[:-1][steps][valid], realised[steps][valid]  # (n, Q), (n,)
    law = np.sort(law, -1)  # what a law says is read in order: predictions may cross
    at = np.array(list(metrics.COVERAGE))
    quantiles = law @ interpolation_weights(levels, at)
    covered = coverage(quantiles, realised)
    figures = dict(zip(metrics.COVERAGE.values(), covered.tolist(), strict=True))
    spread = float(realised.std())
    if not config.return_scale.enabled:
        figures[metrics.COVERAGE_ERROR] = coverage_error(quantiles, realised, at, SAME * spread)
    elif spread > 0.0:
        figures[metrics.RETURN_SCALE_RATIO] = scale.std / spread
        if spread >= NO_SPREAD * scale.std:
            figures[metrics.COVERAGE_ERROR] = coverage_error(quantiles, realised, at, SAME * spread)
    predicted = law @ np.asarray(cvar_weights(levels, alpha, "normal"))
    figures[metrics.PREDICTED_CVAR] = float(predicted.mean())
    if alpha < 1.0:
        threshold = (law @ interpolation_weights(levels, np.array([alpha])))[..., 0]
        figures[metrics.EMPIRICAL_CVAR] = realised_cvar(threshold, realised, alpha)
    else:
        figures[metrics.EMPIRICAL_CVAR] = float(realised.mean())
    return figures


TOLD = itemgetter("costs", "equity", "turnover")


class TradingSample:
    """What trading cost, on every eighth step of some environments whose infos tell `equity`, `costs`, `turnover`."""

    EVERY, N_ENVS = 8, 32

    def __init__(self) -> None:
        self.net: list[NDArray[np.floating[Any]]] = []
        self.paid: list[NDArray[np.floating[Any]]] = []
        self.turned: list[float] = []

    def note(self, n_steps: int, rewards: NDArray[Any], infos: list[dict[str, Any]]) -> None:
        """Look at one step of all environments."""
        if n_steps % self.EVERY or "turnover" not in infos[0]:
            return
        infos = infos[: self.N_ENVS]
        self.net.append(np.asarray(rewards[: self.N_ENVS], np.float64))
        costs, equity, turnover = zip(*map(TOLD, infos), strict=True)
        self.paid.append(np.array(costs) / np.maximum(equity, 1e-12))
        self.turned.append(sum(turnover) / len(turnover))

    def figures(self) -> Mapping[Metric, float]:
        """Of the rollout just seen; then it is forgotten."""
        if not self.net:
            return {}
        net, paid = np.concatenate(self.net), np.concatenate(self.paid)
        found = {metrics.TURNOVER: float(np.mean(self.turned))}
        gross = net + paid
        if gross.mean() > 3.0 * gross.std() / np.sqrt(len(gross)):
            found[metrics.COST_SHARE] = float(paid.mean() / gross.mean())
        self.net, self.paid, self.turned = [], [], []
        return found


# every trunk apart: its recurrent state, and what gradient reaches it and its head

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
