"""The policy: recurrent trunks, action heads, critic heads."""

from tailguard.policy.critics import CriticConfig
from tailguard.policy.policy import Critic, Judged, PolicyConfig, RecurrentPolicy
from tailguard.policy.recurrent import Layout, State

__all__ = ["Critic", "CriticConfig", "Judged", "Layout", "PolicyConfig", "RecurrentPolicy", "State"]
