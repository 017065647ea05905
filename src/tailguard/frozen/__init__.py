"""Frozen policies: what was trained as a folder that `tailguard_runtime` runs with numpy alone."""

from tailguard.frozen.export import export

__all__ = ["export"]
