"""The gate of UPGD on Adam's direction: the same learning rates as Adam, and weights that stay able to learn."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tailguard.optim.gating import Gate, GatedOptimizer, Protect


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
    decoupled_decay = False

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
