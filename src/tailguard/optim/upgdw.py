"""AdaptiveUPGD with decoupled weight decay: what AdamW is to Adam."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tailguard.optim.adaptive_upgd import AdaptiveUPGD


class UPGDW(AdaptiveUPGD):
    """w <- (1 - lr weight_decay) w - lr gate (d + sigma noise): the decay passes neither the moments nor the gate."""

    decoupled_decay = True

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *, weight_decay: float = 0.01, **options: Any) -> None:
        super().__init__(params, lr, weight_decay=weight_decay, **options)
