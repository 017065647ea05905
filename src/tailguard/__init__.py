"""Recurrent distributional PPO for trading agents that know their tail risk."""
