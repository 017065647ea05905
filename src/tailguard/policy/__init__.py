"""The policy: recurrent trunks, action heads, critic heads."""

from tailguard.policy.critics import CriticConfig
from tailguard.policy.policy import PolicyConfig, RecurrentPolicy
from tailguard.policy.recurrent import Layout, State, lay_out

__all__ = ["CriticConfig", "Layout", "PolicyConfig", "RecurrentPolicy", "State", "lay_out"]
