"""Utility-based perturbed gradient descent (Elsayed and Mahmood, ICLR 2024) with first-order global utility."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tailguard.optim import kernels
from tailguard.optim.batches import Batch, StepNoise
from tailguard.optim.gating import Gate, GatedOptimizer, Protect, extremes_of, track_utility


class UPGD(GatedOptimizer):
    """SGD whose step shrinks where the weight is useful and grows where it harms, plus noise to revive dead weights.

    u = average of -g w;  gate = 2 (1 - sigmoid(u / max u));  w <- (1 - lr weight_decay) w - lr gate (g + sigma noise)

    A weight of zero utility takes exactly the SGD step. `protect="noise"` gates the noise only. The noise is in
    units of the gradient; `adaptive_noise=True` multiplies it with the gradient's root mean square.
    """

    scale_free = False
    buffers = ("avg_utility",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        beta_utility: float = 0.999,
        sigma: float = 1e-3,
        weight_decay: float = 0.0,
        gate: Gate = "max",
        protect: Protect = "weights",
        adaptive_noise: bool = False,
        generator: torch.Generator | None = None,
        fused: bool = True,
    ) -> None:
        defaults = {"lr": lr, "beta_utility": beta_utility, "sigma": sigma, "weight_decay": weight_decay}
        super().__init__(
            params,
            defaults,
            gate=gate,
            protect=protect,
            adaptive_noise=adaptive_noise,
            generator=generator,
            fused=fused,
        )

    def _track(self, batch: Batch) -> tuple[float, float]:
        if not batch.fused:
            return track_utility(batch, self.gate)
        keep = np.float32(1.0 - batch.group["beta_utility"])
        return extremes_of([kernels.track_utility(*part.arrays, keep) for part in batch.parts])

    def _direction(self, batch: Batch) -> list[Tensor]:
        return batch.grads

    def _move_fused(self, batch: Batch, centre: float, width: float, noise: StepNoise | None) -> float:
        told = self.protect == "weights", np.array([centre, width, *self._fused_numbers(batch, noise)], np.float32)
        kicks = zip(batch.parts, self._fused_noise(batch, noise), strict=True)
        return float(sum(kernels.move_along_gradient(*part.arrays, kick, *told) for part, kick in kicks))
