"""The contract of everything that is saved: state in, state out, strictly by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from tailguard.errors import StateError


@runtime_checkable
class Stateful(Protocol):
    """All state of a component leaves through `state_dict` and returns through `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


def require_keys(component: Stateful, state: Mapping[str, Any]) -> None:
    """Strict: nothing missing, nothing extra."""
    expected, found = set(component.state_dict()), set(state)
    if expected != found:
        raise StateError(
            f"{type(component).__name__} cannot load this state: missing {sorted(expected - found)}, "
            f"unknown {sorted(found - expected)}. It was written by another version or another component."
        )
