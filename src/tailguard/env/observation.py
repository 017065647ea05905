"""What the agent sees at the close of a bar: the features of the bar, then its own account. Each column has a name.

Returns of the account are in percent, so that they are of the order of one like the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from tailguard.errors import ConfigError, DataError
from tailguard.market import Bars

Observation = npt.NDArray[np.float32]

AgentState = Literal["weight", "unrealised", "time_left", "period_return"]
AGENT_STATE: tuple[AgentState, ...] = get_args(AgentState)
PER_ASSET = ("weight", "unrealised")


@dataclass(frozen=True)
class Layout:
    """Where each quantity stands in an observation of `size` numbers."""

    names: tuple[str, ...]
    columns: npt.NDArray[np.int64]  # (4,) first column of each agent state, -1 where it is left out

    @property
    def size(self) -> int:
        return len(self.names)

    def __getitem__(self, name: str) -> int:
        """Column of a name."""
        if name not in self.names:
            raise ConfigError(f"No observation is called {name!r}; there are {', '.join(self.names)}.")
        return self.names.index(name)

    def columns_of(self, prefix: str) -> list[int]:
        """Columns of a quantity: `weight` gives those of every asset, in the order of the assets."""
        return [i for i, name in enumerate(self.names) if name == prefix or name.startswith(prefix + ":")]


def layout_of(symbols: Sequence[str], feature_names: Sequence[str], agent_state: Sequence[AgentState]) -> Layout:
    """Features asset by asset, then the agent state; names read `feature:SYMBOL`."""
    names = [f"{name}:{symbol}" for symbol in symbols for name in feature_names]
    columns = np.full(len(AGENT_STATE), -1, dtype=np.int64)
    for i, state in enumerate(AGENT_STATE):
        if state in agent_state:
            columns[i] = len(names)
            names += [f"{state}:{symbol}" for symbol in symbols] if state in PER_ASSET else [state]
    return Layout(tuple(names), columns)


def feature_rows(features: npt.ArrayLike, bars: Bars, look_back: int) -> Observation:
    """(T, A, F) -> (T, A * F) float32. A missing bar shows zeros; other numbers must be finite after the look-back."""
    values = np.array(features, dtype=np.float32)
    shape = bars.tradable.shape
    if values.ndim != 3 or values.shape[:2] != shape:
        raise ConfigError(f"features have shape {values.shape}; bars of {shape[0]} x {shape[1]} need (*{shape}, F).")
    values[~bars.tradable] = 0.0
    bad = np.argwhere(~np.isfinite(values[look_back:]))
    if len(bad):
        t, a, f = (int(i) for i in bad[0])
        raise DataError(
            f"Feature {f} of {bars.symbols[a]!r} is {values[look_back + t, a, f]} at bar {look_back + t}, after the "
            f"look-back of {look_back}. Give the true look_back, or repair the feature."
        )
    values[:look_back] = np.nan_to_num(values[:look_back], nan=0.0, posinf=0.0, neginf=0.0)
    return np.ascontiguousarray(values.reshape(shape[0], -1))
