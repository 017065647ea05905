"""The policy: recurrent trunks, action heads, critic heads."""

from tailguard.policy.config import PolicyConfig
from tailguard.policy.critics import CriticConfig
from tailguard.policy.policy import Critic, CriticOutput, RecurrentPolicy
from tailguard.policy.recurrent import Layout, State

__all__ = ["Critic", "CriticConfig", "CriticOutput", "Layout", "PolicyConfig", "RecurrentPolicy", "State"]
