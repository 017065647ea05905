"""Recurrent distributional PPO for trading agents that know their tail risk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailguard.leftovers import keep_caches_out_of_home

if TYPE_CHECKING:
    from tailguard.ppo import DistributionalPPO, PPOConfig

keep_caches_out_of_home()  # before any library is imported that would make folders there

__all__ = ["DistributionalPPO", "PPOConfig"]


def __getattr__(name: str) -> Any:
    """The learner is imported when it is asked for: checking a data file needs no torch."""
    if name in __all__:
        from tailguard import ppo

        return getattr(ppo, name)
    raise AttributeError(f"module 'tailguard' has no attribute {name!r}")
