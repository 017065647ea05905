"""The gate of UPGD on Adam's direction: the same learning rates as Adam, and weights that stay able to learn."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailguard.optim import kernels
from tailguard.optim.batches import Batch, StepNoise
from tailguard.optim.gating import Gate, GatedOptimizer, Protect, extremes_of, track_utility
from tailguard.optim.kernels import Array


class AdaptiveUPGD(GatedOptimizer):
    """Adam with utility gate and noise.

    u = average of -g w;  gate = 2 (1 - sigmoid(u / max u));  d = m / (sqrt(v) + eps), bias-corrected;
    w <- w - lr gate (d + sigma noise)

    A weight of zero utility takes exactly Adam's step. sigma is in units of the normalized step, about 1 per weight,
    so it means the same for every network and loss scale. Weight decay enters the gradient, as in Adam; `UPGDW`
    decouples it. The utility is that of the loss alone.
    """

    scale_free = True
    buffers = ("avg_utility", "first_moment", "sec_moment")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        beta_utility: float = 0.999,
        sigma: float = 1e-3,
        weight_decay: float = 0.0,
        gate: Gate = "max",
        protect: Protect = "weights",
        adaptive_noise: bool = False,
        generator: torch.Generator | None = None,
        fused: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "beta_utility": beta_utility,
            "sigma": sigma,
            "weight_decay": weight_decay,
        }
        super().__init__(
            params,
            defaults,
            gate=gate,
            protect=protect,
            adaptive_noise=adaptive_noise,
            generator=generator,
            fused=fused,
        )

    def _decay(self, group: dict[str, Any]) -> float:
        return 1.0

    def _l2(self, group: dict[str, Any]) -> float:
        """The share of weight decay that enters the gradient."""
        return float(group["weight_decay"])

    def _track(self, batch: Batch) -> tuple[float, float]:
        return self._track_fused(batch) if batch.fused else self._track_torch(batch)

    def _track_fused(self, batch: Batch) -> tuple[float, float]:
        numbers, whole = self.averaging(batch.group), np.float32(1.0)
        return extremes_of([kernels.track_utility_and_moments(*part.arrays, whole, numbers) for part in batch.parts])

    def averaging(self, group: dict[str, Any]) -> Array:
        """What the averages keep of the newest utility, gradient and square, and the weight decay in the gradient."""
        keeps = [1.0 - beta for beta in (group["beta_utility"], *group["betas"])]
        return np.array([*keeps, self._l2(group)], np.float32)

    def _track_torch(self, batch: Batch) -> tuple[float, float]:
        extremes = track_utility(batch, self.gate)
        l2, grads = self._l2(batch.group), batch.grads
        if l2 > 0:
            grads = list(torch._foreach_add(grads, batch.params, alpha=l2))
        beta1, beta2 = batch.group["betas"]
        first, second = batch.column("first_moment"), batch.column("sec_moment")
        torch._foreach_lerp_(first, grads, 1.0 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, grads, grads, 1.0 - beta2)
        return extremes

    def _corrections(self, batch: Batch) -> tuple[float, float]:
        """(scale, eps) such that scale m / (sqrt(v) + eps) is Adam's bias-corrected direction."""
        beta1, beta2 = batch.group["betas"]
        root = math.sqrt(1.0 - beta2**batch.step)
        return root / (1.0 - beta1**batch.step), batch.group["eps"] * root

    def _direction(self, batch: Batch) -> list[Tensor]:
        scale, eps = self._corrections(batch)
        size = torch._foreach_sqrt(batch.column("sec_moment"))
        torch._foreach_add_(size, eps)
        direction = list(torch._foreach_div(batch.column("first_moment"), size))
        torch._foreach_mul_(direction, scale)
        return direction

    def _move_fused(self, batch: Batch, centre: float, width: float, noise: StepNoise | None) -> float:
        told = self.protect == "weights", np.array([centre, width, *self.moving(batch, noise)], np.float32)
        kicks = zip(batch.parts, self._fused_noise(batch, noise), strict=True)
        return float(sum(kernels.move_along_adam(w, u, m, v, kick, *told) for (_, (w, _, u, m, v)), kick in kicks))

    def moving(self, batch: Batch, noise: StepNoise | None) -> list[float]:
        """Rate, decay, sigma, and Adam's scale and eps."""
        return [*self._fused_numbers(batch, noise), *self._corrections(batch)]
