"""Bundles of older schema versions: what each step adds, and what it has to reset."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from tailguard.checkpoint import SCHEMA_VERSION

Tree = dict[str, Any]


def to_2(tree: Tree) -> str:
    """Version 2 keeps the last episodes' returns, and how a run goes on exactly."""
    tree["parts"]["episodes"] = {"returns": [], "lengths": [], "successes": []}
    tree["parts"]["progress"].pop("_num_timesteps_at_start", None)
    tree["session"] = None
    return "the window of recent episode returns starts empty"


MIGRATIONS: dict[int, Callable[[Tree], str]] = {2: to_2}
"""Each brings a tree to its version and says what was reset."""


def migrate(tree: Tree, version: int, path: Any) -> Tree:
    """A tree of the current schema version, with one warning that says what was reset."""
    reset = [MIGRATIONS[step](tree) for step in range(version + 1, SCHEMA_VERSION + 1)]
    if reset:
        warnings.warn(
            f"{path} has schema version {version}; it was brought to {SCHEMA_VERSION}: {'; '.join(reset)}. "
            "Save it again to be rid of this notice.",
            stacklevel=3,
        )
    return tree
