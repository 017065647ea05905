"""Attacks on trained agents: what is left of the return when somebody moves what the agent sees."""

from tailguard.robustness.attacks import ATTACKS, Attack, make_attack
from tailguard.robustness.bench import AttackConfig, attack_agent
from tailguard.robustness.play import Played, play

__all__ = ["ATTACKS", "Attack", "AttackConfig", "Played", "attack_agent", "make_attack", "play"]
