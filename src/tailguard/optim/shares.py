"""Large parameters in shares, which several threads may move at the same time."""

from __future__ import annotations

from typing import NamedTuple

from tailguard.optim.kernels import BLOCK, Array

LARGE = 1 << 18  # from here on a second core is worth its call


class Part(NamedTuple):
    """What one call of a fused kernel works on: a parameter, or a share of a large one."""

    place: int  # in the concatenation of all parameters: where its noise is read
    arrays: list[Array]  # parameter, gradient and buffers


def extremes_of(found: list[tuple[float, float]]) -> tuple[float, float]:
    """(min, max) over all parts."""
    return min(low for low, _ in found), max(high for _, high in found)


def parts_of(arrays: list[Array], place: int) -> list[Part]:
    """Large arrays in two shares, always the same ones, so that results do not depend on who works on them."""
    size = arrays[0].size
    middle = size // 2 // BLOCK * BLOCK if size >= LARGE else 0
    cuts = [slice(0, middle), slice(middle, size)] if middle else [slice(0, size)]
    return [Part(place + cut.start, [array[cut] for array in arrays]) for cut in cuts]
