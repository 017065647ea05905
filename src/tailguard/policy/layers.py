"""Linear layers with their activations as one differentiable function, in compiled loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tailguard.policy.packing import packed_for_back, packed_weights
from tailguard.policy.products import Array
from tailguard.policy.trunk_kernel import dense_backward, dense_forward, out_of
from tailguard.policy.trunk_layout import Shape, in_one, layers_of

NOTHING = np.zeros((0, 0), np.float32)


class Outs(NamedTuple):
    """Of every layer, and their gradients."""

    outs: Array
    d_outs: Array


def layered(linear: Sequence[nn.Linear], rectify: bool, features: Tensor) -> Tensor:
    """(..., W) from features (..., H)."""
    parameters = [part for layer in linear for part in (layer.weight, layer.bias)]
    flat, begins = in_one(parameters)
    shape = layers_of(linear, begins, rectify)
    output: Tensor = Layers.apply(features.flatten(0, -2), shape, flat, *parameters)  # type: ignore[no-untyped-call]
    return output.view(*features.shape[:-1], output.shape[-1])


class Layers(torch.autograd.Function):
    """(rows, W) from (rows, H), of parameters whose copy is `flat`; their gradients only where they are asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: Shape, flat: Array, *parameters: Tensor) -> Tensor:
        rows, last = x.contiguous().numpy(), len(shape.dense) - 1
        outs = np.empty(len(rows) * int(shape.dense[:, 2].sum()), np.float32)
        dense_forward(shape, flat, packed_weights(shape, flat), rows, outs)
        ctx.shape, ctx.flat, ctx.rows, ctx.outs = shape, flat, rows, outs
        ctx.extents = [parameter.shape for parameter in parameters]
        return torch.from_numpy(out_of(shape, outs, len(rows), last).copy())

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        shape, rows = ctx.shape, ctx.rows
        outs = Outs(ctx.outs, np.empty_like(ctx.outs))
        out_of(shape, outs.d_outs, len(rows), len(shape.dense) - 1)[:] = upstream[0].numpy()
        d_x = np.empty_like(rows) if ctx.needs_input_grad[0] else NOTHING
        gradient = np.zeros_like(ctx.flat) if any(ctx.needs_input_grad[3:]) else ctx.flat[:0]
        dense_backward(shape, packed_for_back(shape, ctx.flat), rows, outs, d_x, gradient)
        d_input = torch.from_numpy(d_x) if d_x.size else None
        if not gradient.size:
            return d_input, None, None, *(None for _ in ctx.extents)
        parts = torch.split(torch.from_numpy(gradient), [extent.numel() for extent in ctx.extents])
        return d_input, None, None, *(part.view(extent) for part, extent in zip(parts, ctx.extents, strict=True))
