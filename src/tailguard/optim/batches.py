"""What one step of the UPGD family works on: parameters that step alike, and what all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from tailguard.optim.kernels import Array

Group = dict[str, Any]


class Part(NamedTuple):
    """What one call of a fused kernel works on: a parameter."""

    place: int  # in the concatenation of all parameters: where its noise is read
    arrays: list[Array]  # parameter, gradient and buffers


@dataclass
class Batch:
    """Parameters that step alike: one group, device, type and step count, so that one call treats them all."""

    group: Group
    step: int
    fused: bool
    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict[str, Any]]
    positions: list[int]  # of each parameter in the concatenation of all
    parts: list[Part]  # of a fused batch

    def column(self, name: str) -> list[Tensor]:
        return [state[name] for state in self.states]

    @property
    def correction(self) -> float:
        """Bias correction of the utility average, 1 - beta^t."""
        return 1.0 - float(self.group["beta_utility"] ** self.step)


@dataclass
class Views:
    """A parameter and its buffers as arrays, kept while they lie where they lay: asking torch for an array takes longer
    than looking, and an array keeps its memory, so nothing else can lie there."""

    addresses: list[int]  # of all, after the number of elements: a part of the same memory begins where the whole does
    arrays: list[Array]


@dataclass
class GateRange:
    """The gate's argument is (utility - centre) / width; an infinite width switches the gate off: exactly 1."""

    centre: float
    width: float


@dataclass
class StepNoise:
    """Noise of one step: a place in the pool and a signed size per unit of sigma."""

    offset: int
    size: float
