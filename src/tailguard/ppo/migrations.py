"""Bundles of older schema versions: what each step adds, and what it has to reset."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from tailguard.checkpoint import SCHEMA_VERSION
from tailguard.stateful import Stateful

Tree = dict[str, Any]


def to_2(tree: Tree) -> str:
    """Version 2 says how a run goes on exactly."""
    tree["parts"]["progress"].pop("_num_timesteps_at_start", None)
    tree["session"] = None
    return "it does not say where its episodes stood"


MIGRATIONS: dict[int, Callable[[Tree], str]] = {2: to_2}
"""Each brings a tree to its version and says what was reset."""


def migrate(tree: Tree, version: int, parts: Mapping[str, Stateful], path: Any) -> None:
    """Bring a tree to the current schema version; parts it did not know start fresh, and one warning says so."""
    if version == SCHEMA_VERSION:
        return
    reset = [MIGRATIONS[step](tree) for step in range(version + 1, SCHEMA_VERSION + 1)]
    new = sorted(set(parts) - set(tree["parts"]))
    tree["parts"].update({name: parts[name].state_dict() for name in new})
    if new:
        reset.append(f"{', '.join(new)} start fresh")
    warnings.warn(
        f"{path} has schema version {version}; it was brought to {SCHEMA_VERSION}: {'; '.join(reset)}. "
        "Save it again to be rid of this notice.",
        stacklevel=4,
    )
