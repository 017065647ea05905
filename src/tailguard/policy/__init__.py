"""The policy: recurrent trunks, action heads, critic heads."""

from tailguard.policy.critics import CriticConfig
from tailguard.policy.policy import Judged, PolicyConfig, RecurrentPolicy
from tailguard.policy.recurrent import Layout, State

__all__ = ["CriticConfig", "Judged", "Layout", "PolicyConfig", "RecurrentPolicy", "State"]
