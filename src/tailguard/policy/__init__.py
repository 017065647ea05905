"""The policy: recurrent trunks, action heads, critic heads."""

from tailguard.policy.critics import CriticConfig
from tailguard.policy.policy import PolicyConfig, RecurrentPolicy
from tailguard.policy.recurrent import Layout, State

__all__ = ["CriticConfig", "Layout", "PolicyConfig", "RecurrentPolicy", "State"]
