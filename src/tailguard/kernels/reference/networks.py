"""What the kernels of the networks compute, in torch: the oracle of the native core and its stand-in.

Axes as in kernels/networks.py. Everything works in any float dtype, so that tests can hold float32 against float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.kernels.jobs import ActorJob, CriticJob
from tailguard.kernels.layout import TrunkLayout

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)

Floats = NDArray[np.float32]
Array = NDArray[Any]


def trunk_forward(
    layout: TrunkLayout,
    weights: Tensor,
    x: Tensor,
    starts: Tensor,
    hidden: Tensor,
    cell: Tensor,
    parameters: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output (L, B, W), features (L, B, D), and hidden states and cells (L, layers, B, H) after each step.

    weights: (P,);  x: (L, B, F);  starts: (L, B);  hidden, cell: (layers, B, H);  parameters: read instead of weights
    """
    parts = list(parameters) or [
        weights[offset : offset + torch.Size(shape).numel()].view(shape) for offset, shape in layout.parts()
    ]
    recurrent = [parts[3 * k : 3 * k + 3] for k in range(len(layout.recurrent))]
    dense = parts[3 * len(recurrent) :]
    kept = torch.where(starts, 0.0, 1.0).to(x.dtype).unsqueeze(-1)  # (L, B, 1)
    hiddens, cells = [], []
    for k, (input_weight, hidden_weight, bias) in enumerate(recurrent):
        h, c, past_h, past_c = hidden[k].detach(), cell[k].detach(), [], []
        for t in range(len(x)):
            h, c = torch.where(kept[t] > 0, h, 0.0), torch.where(kept[t] > 0, c, 0.0)
            gates = x[t] @ input_weight.T + h @ hidden_weight.T + bias
            entry, forget, candidate, output = gates.chunk(4, -1)
            c = forget.sigmoid() * c + entry.sigmoid() * candidate.tanh()
            h = output.sigmoid() * c.tanh()
            past_h.append(h)
            past_c.append(c)
        x = torch.stack(past_h)
        hiddens.append(x)
        cells.append(torch.stack(past_c))
    features = x
    for k in range(0, len(dense), 2):
        features = x
        x = x @ dense[k].T + dense[k + 1]
        if k + 2 < len(dense):
            x = x.relu() if layout.activation == "relu" else x.tanh()
    none = x.new_zeros(len(x), 0, x.shape[1], layout.n_units)
    return x, features, torch.stack(hiddens, 1) if hiddens else none, torch.stack(cells, 1) if cells else none


class Trunk:
    """A trunk for acting and evaluation."""

    def __init__(self, layout: TrunkLayout) -> None:
        self.layout = layout

    def load(self, weights: Floats) -> None:
        self.weights = torch.from_numpy(weights.copy())

    def step(self, x: Floats, hidden: Floats, cell: Floats, output: Floats, n_threads: int = 1) -> None:
        """One step of N environments; hidden, cell and output are filled."""
        starts = np.zeros((1, len(x)), np.bool_)
        evaluated = self.run(x[None], starts, hidden, cell)
        output[:], hidden[:], cell[:] = evaluated[0][0], evaluated[2][0], evaluated[3][0]

    @torch.no_grad()
    def run(self, *arrays: Array) -> list[Floats]:
        """trunk_forward() of x, starts, hidden and cell."""
        x, starts, hidden, cell = (torch.from_numpy(part) for part in arrays)
        return [part.numpy() for part in trunk_forward(self.layout, self.weights, x, starts, hidden, cell)]


def evaluate(
    trunks: Sequence[Trunk], arrays: Sequence[Sequence[Any]], starts: Array, length: int, where: Array, n_threads: int
) -> None:
    """Fill what kernels.networks.evaluate() returns."""
    for trunk, (x, hidden, cell, output, features, *states) in zip(trunks, arrays, strict=True):
        before, after = states[:2], states[2:]
        results = trunk.run(x, starts, hidden, cell)
        output[:] = results[0]
        if features is not None:
            features[:] = results[1]
        for now, every, earlier, later in zip((hidden, cell), results[2:], before, after, strict=True):
            previous = np.concatenate([now[None], every[:-1]])[::length]  # (S, layers, N, H)
            earlier[:] = np.where(starts[::length, None, :, None], np.float32(0.0), previous)
            later[:] = every[where[:, 0], :, where[:, 1]].swapaxes(0, 1)
            now[:] = every[-1]


def quantile_huber_loss(quantiles: Tensor, samples: Tensor, levels: Tensor, kappa: float) -> Tensor:
    """(..., Q) and (..., K) to (...): the loss of kernels.networks.quantile_huber(), every pair in memory."""
    error = samples.unsqueeze(-2) - quantiles.unsqueeze(-1)  # (..., Q, K)
    size = error.abs()
    huber = torch.where(size <= kappa, 0.5 * size.square() / kappa, size - 0.5 * kappa) if kappa > 0 else size
    weight = (levels.unsqueeze(-1) - (error < 0).to(error.dtype)).abs()
    return (weight * huber).mean(-1).sum(-1)


def quantile_huber(quantiles: Floats, samples: Floats, levels: Floats, kappa: float) -> tuple[Floats, Floats]:
    """Loss (M,) and gradient (M, Q)."""
    predicted = torch.from_numpy(quantiles).clone().requires_grad_()
    with torch.enable_grad():
        loss = quantile_huber_loss(predicted, torch.from_numpy(samples), torch.from_numpy(levels), kappa)
        (gradient,) = torch.autograd.grad(loss.sum(), predicted)
    return loss.detach().numpy(), gradient.numpy()


def gradient(job: ActorJob | CriticJob, chosen: NDArray[np.int64], dtype: torch.dtype = torch.float32) -> list[float]:
    """Write one job's gradient and return its sums, by torch's automatic differentiation."""
    some = {
        name: torch.from_numpy(np.ascontiguousarray(getattr(job, name)[:, chosen]))
        for name in ("observations", "starts", "hidden", "cell", "valid")
    }
    valid = some["valid"]
    x = torch.where(valid.unsqueeze(-1) | some["observations"].isfinite(), some["observations"], 0.0).to(dtype)
    states = [
        torch.where(valid[:1].unsqueeze(-1) | some[part].isfinite(), some[part], 0.0) for part in ("hidden", "cell")
    ]
    weights = torch.from_numpy(job.weights).to(dtype).requires_grad_()
    layouts = [job.layout]
    with torch.enable_grad():
        output, features, *_ = trunk_forward(
            job.layout, weights, x, some["starts"], states[0].to(dtype), states[1].to(dtype)
        )
        log_std_at = -1
        if isinstance(job, ActorJob):
            log_std_at = job.log_std_at
            loss, sums = actor_loss(job, chosen, valid, output[valid], weights, dtype)
        else:
            loss, sums = critic_loss(job, chosen, valid, output[valid], weights, dtype)
            if job.risk_layout is not None:
                risk_loss, risk_sum = risk_value_loss(job, chosen, valid, features[valid].detach(), weights, dtype)
                loss, sums, layouts = loss + risk_loss, [sums[0], risk_sum], [job.layout, job.risk_layout]
        (d_weights,) = torch.autograd.grad(loss + 0.0 * weights.sum(), weights)
    for layout in layouts:
        for offset, shape in layout.parts():
            count = torch.Size(shape).numel()
            job.gradient[offset : offset + count] = d_weights[offset : offset + count].numpy()
    if log_std_at >= 0:
        end = log_std_at + job.layout.n_outputs
        job.gradient[log_std_at:end] = d_weights[log_std_at:end].numpy()
    return sums


def of_valid(array: Array, chosen: NDArray[np.int64], valid: Tensor, dtype: torch.dtype) -> Tensor:
    """(M, ...) the valid samples of (L, S, ...)."""
    return torch.from_numpy(np.ascontiguousarray(array[:, chosen])).to(dtype)[valid]


def actor_loss(
    job: ActorJob, chosen: NDArray[np.int64], valid: Tensor, output: Tensor, weights: Tensor, dtype: torch.dtype
) -> tuple[Tensor, list[float]]:
    """The actor's loss times its scale, and the sums that gradients() returns; output: (M, W) of valid samples."""
    actions, old, gain = (of_valid(part, chosen, valid, dtype) for part in (job.actions, job.log_probs, job.advantages))
    if job.log_std_at >= 0:
        log_std = weights[job.log_std_at : job.log_std_at + actions.shape[1]]
        z = (actions - output) * (-log_std).exp()
        log_prob = (-0.5 * z.square() - log_std - HALF_LOG_2PI).sum(-1)
        entropy = (log_std + 0.5 + HALF_LOG_2PI).sum().expand_as(log_prob)
    else:
        log_prob, entropy = output.new_zeros(len(output)), output.new_zeros(len(output))
        for a, logits in enumerate(torch.split(output, list(job.n_choices), -1)):
            log_p = logits.log_softmax(-1)
            log_prob = log_prob + log_p.gather(-1, actions[:, a : a + 1].long()).squeeze(-1)
            entropy = entropy - (log_p.exp() * log_p).sum(-1)
    log_ratio = log_prob - old
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1.0 - job.clip_range, 1.0 + job.clip_range)
    surrogate = -torch.minimum(ratio * gain, bounded * gain).sum()
    kl = (log_ratio.expm1() - log_ratio).sum()
    clipped = ((ratio - 1.0).abs() > job.clip_range).sum()
    largest = log_ratio.abs().max() if len(log_ratio) else log_ratio.sum()
    loss = job.scale * (surrogate - job.ent_coef * entropy.sum() + job.kl_beta * kl)
    return loss, [float(part.detach()) for part in (surrogate, entropy.sum(), kl, clipped, largest)]


def critic_loss(
    job: CriticJob, chosen: NDArray[np.int64], valid: Tensor, output: Tensor, weights: Tensor, dtype: torch.dtype
) -> tuple[Tensor, list[float]]:
    """The critic's loss times its scale, and the sums of value loss and risk loss (0 so far)."""
    target, levels = of_valid(job.target, chosen, valid, dtype), torch.from_numpy(job.levels).to(dtype)
    loss = quantile_huber_loss(output, target, levels, job.kappa).sum()
    return job.scale * loss, [float(loss.detach()), 0.0]


def risk_value_loss(
    job: CriticJob, chosen: NDArray[np.int64], valid: Tensor, features: Tensor, weights: Tensor, dtype: torch.dtype
) -> tuple[Tensor, float]:
    """The risk value's loss times the job's scale, and its sum; features: (M, D) of valid samples."""
    if job.risk is None or job.risk_layout is None:
        return features.new_zeros(()), 0.0
    risk = of_valid(job.risk, chosen, valid, dtype)
    observed = job.observations if job.risk_observations is None else job.risk_observations
    x = torch.cat([features, of_valid(observed, chosen, valid, dtype), risk[:, :2]], -1).unsqueeze(0)  # (1, M, I)
    none = x.new_zeros(0, x.shape[1], 0)
    value = trunk_forward(job.risk_layout, weights, x, torch.zeros(x.shape[:2], dtype=torch.bool), none, none)[0]
    loss = 0.5 * (value[0, :, 0] - risk[:, 2]).square().sum()
    return job.scale * loss, float(loss.detach())
