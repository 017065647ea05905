"""Utility-based perturbed gradient descent (Elsayed and Mahmood, ICLR 2024) with first-order global utility."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tailguard.optim.gating import Gate, GatedOptimizer, Protect


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
