"""Recurrent distributional PPO for trading agents that know their tail risk."""

from tailguard.ppo import DistributionalPPO, PPOConfig

__all__ = ["DistributionalPPO", "PPOConfig"]
