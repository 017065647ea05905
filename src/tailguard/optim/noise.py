"""Gaussian noise at the price of a view: a pool drawn once, read at a random place with a random sign.

A fresh draw costs more than the whole optimizer step. Here step t uses sign_t * pool[offset_t : offset_t + n], with
offset and sign from the generator. The sign makes noise of different steps uncorrelated whatever the offsets are; the
65,536 offsets make each weight see that many normal values. The price is one more number per parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tailguard.errors import StateError

OFFSETS = 65_536
SEED_BOUND = 2**31


class NoisePool:
    """Standard normal noise, a pure function of (seed, generator state): those two are all of its state."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        if generator is None:  # follows torch.manual_seed without drawing from the global stream
            generator = torch.Generator().manual_seed(torch.initial_seed())
        self.generator = generator
        self.seed = int(torch.randint(SEED_BOUND, (1,), generator=generator, device=generator.device))
        self._drawn = torch.empty(2, dtype=torch.int64, device=generator.device)
        self._pool = torch.empty(0)  # made when first needed: noise switched off costs no memory
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def draw(self, n: int) -> tuple[int, float]:
        """Place and sign of the next noise vector of length n: see `read`."""
        offset, sign = self._drawn.random_(OFFSETS, generator=self.generator).tolist()
        self._ensure(n)
        return offset, 1.0 if sign % 2 else -1.0

    def read(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The pool itself, unit variance, on this device in this type; never written to."""
        key = (device, dtype)
        if key not in self._copies:
            self._copies[key] = self._pool.to(device=device, dtype=dtype)
        return self._copies[key]

    def _ensure(self, n: int) -> None:
        """Drawn in chunks, so that a larger pool starts with the values of a smaller one."""
        chunks = -(-n // OFFSETS) + 1
        if self._pool.numel() < chunks * OFFSETS:
            source = torch.Generator().manual_seed(self.seed)
            self._pool = torch.cat([torch.randn(OFFSETS, generator=source) for _ in range(chunks)])
            self._copies.clear()

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state) != {"seed", "generator"}:
            raise StateError(f"Noise state needs 'seed' and 'generator', found {sorted(state)}.")
        self.generator.set_state(state["generator"].to(device="cpu", dtype=torch.uint8))
        self.seed = int(state["seed"])
        self._pool = torch.empty(0)
        self._copies.clear()
