"""The algorithm."""

from tailguard.ppo.algorithm import DistributionalPPO
from tailguard.ppo.config import PPOConfig

__all__ = ["DistributionalPPO", "PPOConfig"]
