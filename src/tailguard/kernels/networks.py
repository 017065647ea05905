"""Networks on the native core: acting, evaluation of rollouts, gradients of batches, differentiable trunks.

Arrays in, arrays out, float32 and C order; axes: T steps of a rollout, L steps of a sequence, N environments,
S sequences, B sequences of a batch, F inputs, H units, W outputs, D features, A action dimensions, Q quantiles,
K samples of the return. Results do not depend on the number of threads. `reference/networks.py` defines each function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailguard.kernels.core import native
from tailguard.kernels.jobs import ActorJob, CriticJob, OutputJob
from tailguard.kernels.layout import TrunkLayout
from tailguard.kernels.reference import networks as reference

Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class Trunk:
    """A trunk for acting and evaluation, with a copy of its weights that products read fast."""

    def __init__(self, layout: TrunkLayout) -> None:
        module = native()
        self.layout = layout
        self.kernel: Any = reference.Trunk(layout) if module is None else module.Trunk(layout)

    def load(self, weights: Floats) -> None:
        """Copy the trunk's weights out of the flat vector (P,); to be called after every change of them."""
        self.kernel.load(weights)

    def step(self, x: Floats, hidden: Floats, cell: Floats, output: Floats, n_threads: int = 1) -> None:
        """One step of N environments.

        x:            (N, F)
        hidden, cell: (layers, N, H) before the step; become those after it (zero them where an episode starts)
        output:       (N, W) is filled
        """
        self.kernel.step(x, hidden, cell, output, n_threads)


class Evaluation(NamedTuple):
    """What evaluate() returns for a trunk."""

    output: Floats
    """(T, N, W)"""
    features: Floats | None
    """(T, N, D) what the last dense layer read; None unless asked for."""
    before_hidden: Floats
    """(S, layers, N, H) hidden states before each sequence; zero where an episode starts."""
    before_cell: Floats
    after_hidden: Floats
    """(layers, E, H) hidden states after the steps `where`."""
    after_cell: Floats


def evaluate(
    trunks: Sequence[Trunk],
    x: Sequence[Floats],
    starts: Bools,
    hidden: Sequence[Floats],
    cell: Sequence[Floats],
    sequence_length: int,
    where: Ints,
    n_threads: int = 1,
    features: Sequence[bool] = (),
) -> list[Evaluation]:
    """A whole rollout through some trunks, without gradient.

    x:               per trunk (T, N, F)
    starts:          (T, N) an episode starts at this step: the state before it is zero
    hidden, cell:    per trunk (layers, N, H) before the first step; become those after the last
    sequence_length: steps between two recorded states
    where:           (E, 2) step and environment after which states are asked for
    features:        per trunk whether its features are asked for; all False when empty
    """
    n_steps, n_envs = starts.shape
    n_sequences, n_events = -(-n_steps // sequence_length), len(where)
    results, arrays = [], []
    for k, trunk in enumerate(trunks):
        layout, layers = trunk.layout, len(trunk.layout.recurrent)
        wanted = k < len(features) and features[k]
        output = np.empty((n_steps, n_envs, layout.n_outputs), np.float32)
        read = np.empty((n_steps, n_envs, layout.n_features), np.float32) if wanted else None
        before = [np.empty((n_sequences, layers, n_envs, layout.n_units), np.float32) for _ in range(2)]
        after = [np.empty((layers, n_events, layout.n_units), np.float32) for _ in range(2)]
        results.append(Evaluation(output, read, *before, *after))
        arrays.append((x[k], hidden[k], cell[k], output, read, *before, *after))
    kernels = [trunk.kernel for trunk in trunks]
    run = reference.evaluate if (module := native()) is None else module.evaluate
    run(kernels, arrays, starts, sequence_length, where.reshape(-1, 2), n_threads)
    return results


def quantile_huber(
    quantiles: Floats, samples: Floats, levels: Floats, kappa: float, n_threads: int = 1
) -> tuple[Floats, Floats]:
    """Quantile regression loss with a Huber zone, divided by kappa, and its gradient; kappa 0 is the pinball loss.

    quantiles: (M, Q) at `levels` (Q,);  samples: (M, K)
    returns:   loss (M,), summed over quantiles and averaged over samples;  gradient (M, Q)
    """
    module = native()
    if module is None:
        return reference.quantile_huber(quantiles, samples, levels, kappa)
    loss, gradient = np.empty(len(quantiles), np.float32), np.empty_like(quantiles)
    module.quantile_huber(quantiles, samples, levels, kappa, loss, gradient, n_threads)
    return loss, gradient


# the gradient of a batch


def gradients(jobs: Sequence[ActorJob | CriticJob], chosen: Ints, n_threads: int = 1) -> list[list[float]]:
    """Gradients of the losses of the chosen sequences (B,), written to each job's `gradient`, and sums of losses.

    A sample that is not valid has no gradient, whatever its numbers are. Without a valid one, gradients are zero.

    returns: per actor the sums over valid samples of surrogate, entropy, KL estimate and clipped samples, and the
             largest |log ratio|; per critic the sums of value loss and risk loss
    """
    module = native()
    if module is None:
        return [reference.gradient(job, chosen) for job in jobs]
    sums: list[list[float]] = module.gradients(list(jobs), chosen, n_threads)
    return sums


# trunks that torch differentiates through


class TrunkFunction(torch.autograd.Function):
    """Output and features of a trunk; the gradient goes to x and to the flat weights, or to parameters inside them."""

    @staticmethod
    def forward(
        ctx: Any, layout: TrunkLayout, n_threads: int, starts: Tensor, hidden: Tensor, cell: Tensor, weights: Tensor,
        x: Tensor, *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        first, end = layout.span()
        own = weights.detach()[first:end].clone()
        ctx.save_for_backward(own, x, starts, hidden, cell)
        ctx.layout, ctx.first, ctx.n_threads, ctx.n_weights = layout.shifted(-first), first, n_threads, len(weights)
        ctx.set_materialize_grads(False)
        ctx.taped, output, features = TrunkFunction.forward_pass(ctx, own, x, starts, hidden, cell)
        return torch.from_numpy(output), torch.from_numpy(features)

    @staticmethod
    def forward_pass(ctx: Any, *tensors: Tensor) -> tuple[tuple[OutputJob, Any], Floats, Floats]:
        """(a job for the backward pass, its tape), output and features."""
        own, x, starts, hidden, cell = arrays_of(*tensors)
        wanted, layout, sequences = ctx.needs_input_grad, ctx.layout, x.shape[:2]
        output = np.empty((*sequences, layout.n_outputs), np.float32)
        features = np.empty((*sequences, layout.n_features), np.float32)
        gradient = np.zeros_like(own) if wanted[5] or any(wanted[7:]) else None
        given = {"d_output": np.empty_like(output), "d_features": np.empty_like(features)}
        d_x = np.empty_like(x) if wanted[6] else None
        job = OutputJob(layout, own, gradient, x, starts, hidden, cell, **given, d_x=d_x)
        module: Any = native()
        tape = module.Tape(job, np.arange(x.shape[1]), output, features, ctx.n_threads)
        return (job, tape), output, features

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        (d_output, d_features), wanted = upstream, ctx.needs_input_grad
        results: list[Tensor | None] = [None] * len(wanted)
        if d_output is None and d_features is None:
            return tuple(results)
        tensors = ctx.saved_tensors  # torch refuses where one of them was changed since
        if ctx.taped is None:  # a backward pass before this one used it up
            ctx.taped = TrunkFunction.forward_pass(ctx, *tensors)[0]
        (job, tape), ctx.taped = ctx.taped, None
        for given, found in zip((job.d_output, job.d_features), upstream, strict=True):
            given[:] = 0.0 if found is None else found.detach().numpy()
        tape.backward(ctx.n_threads)
        if job.d_x is not None:
            results[6] = torch.from_numpy(job.d_x)
        if job.gradient is not None:
            gradient = torch.from_numpy(job.gradient)
            if wanted[5]:
                after = ctx.n_weights - ctx.first - len(gradient)
                results[5] = torch.nn.functional.pad(gradient, (ctx.first, after))
            for k, (offset, shape) in enumerate(ctx.layout.parts() if any(wanted[7:]) else ()):
                part = gradient[offset : offset + torch.Size(shape).numel()].view(shape)
                results[7 + k] = part if wanted[7 + k] else None
        return tuple(results)


def arrays_of(*tensors: Tensor | None) -> list[Any]:
    """Contiguous arrays of tensors, which they share memory with if they are contiguous themselves."""
    return [None if tensor is None else tensor.detach().contiguous().numpy() for tensor in tensors]


def trunk_forward(
    layout: TrunkLayout,
    weights: Tensor,
    x: Tensor,
    starts: Tensor,
    hidden: Tensor,
    cell: Tensor,
    parameters: Sequence[Tensor] = (),
    n_threads: int = 1,
) -> tuple[Tensor, Tensor]:
    """Output (L, B, W) and features (L, B, D) of a trunk, differentiable once; no gradient goes to the first state.

    What the forward pass found is kept for one backward pass; another one would compute it again.

    weights:      (P,) flat, of which the layout's part is read
    x:            (L, B, F);  starts: (L, B) bool;  hidden, cell: (layers, B, H)
    parameters:   views of `weights` in the order of `layout.parts()` that get the gradient instead of it
    """
    if native() is None:
        return reference.trunk_forward(layout, weights, x, starts, hidden, cell, parameters)[:2]
    result: tuple[Tensor, Tensor] = TrunkFunction.apply(  # type: ignore[no-untyped-call]
        layout, n_threads, starts, hidden, cell, weights, x, *parameters
    )
    return result
