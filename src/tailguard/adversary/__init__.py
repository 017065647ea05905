"""Adversaries in observation space: what an agent is trained against, and the search that attacks share."""

from tailguard.adversary.ball import Ball, attackable_features, feature_sizes, observation_bounds
from tailguard.adversary.config import AdversaryConfig
from tailguard.adversary.search import Scene, Search, frozen, worst_case
from tailguard.adversary.training import Adversary, make_adversary

__all__ = [
    "Adversary",
    "AdversaryConfig",
    "Ball",
    "Scene",
    "Search",
    "attackable_features",
    "feature_sizes",
    "frozen",
    "make_adversary",
    "observation_bounds",
    "worst_case",
]
