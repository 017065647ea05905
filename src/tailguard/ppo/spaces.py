"""Gymnasium spaces as plain JSON, so that a bundle can say what it was trained on without pickle."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from tailguard.errors import CheckpointError


def describe_space(space: spaces.Space[Any]) -> dict[str, Any]:
    """A space as numbers and text."""
    if isinstance(space, spaces.Box):
        return {"kind": "Box", "low": space.low, "high": space.high, "dtype": str(space.dtype)}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start)}
    if isinstance(space, spaces.MultiDiscrete):
        return {"kind": "MultiDiscrete", "nvec": space.nvec, "start": space.start}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "shape": list(space.shape)}
    raise CheckpointError(f"The space {space} cannot be stored.")


def build_space(described: dict[str, Any]) -> spaces.Space[Any]:
    """The space that was described."""
    kind = described.get("kind")
    if kind == "Box":
        dtype = np.dtype(described["dtype"])
        return spaces.Box(described["low"].astype(dtype), described["high"].astype(dtype), dtype=dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(described["n"], start=described["start"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(described["nvec"], start=described["start"])
    if kind == "MultiBinary":
        shape = tuple(described["shape"])
        return spaces.MultiBinary(shape[0] if len(shape) == 1 else shape)
    raise CheckpointError(f"The bundle names a space of kind {kind!r}, which this package does not know.")
