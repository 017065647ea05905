"""Frozen policies of Tailguard with numpy alone: what was trained decides anywhere as it did in training."""

from tailguard_runtime.errors import FrozenPolicyError
from tailguard_runtime.network import State
from tailguard_runtime.policy import FrozenPolicy

__all__ = ["FrozenPolicy", "FrozenPolicyError", "State"]
