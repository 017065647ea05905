"""Recurrent distributional PPO for trading agents that know their tail risk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tailguard.leftovers import keep_caches_out_of_home

if TYPE_CHECKING:
    from tailguard.api import Run, compare, open_run, train
    from tailguard.ppo import DistributionalPPO, PPOConfig

keep_caches_out_of_home()  # before any library is imported that would make folders there

__all__ = ["DistributionalPPO", "PPOConfig", "Run", "compare", "open_run", "train"]


def __getattr__(name: str) -> Any:
    """The learner and the runs are imported when they are asked for: checking a data file needs no torch."""
    if name in ("DistributionalPPO", "PPOConfig"):
        from tailguard import ppo

        return getattr(ppo, name)
    if name in __all__:
        from tailguard import api

        return getattr(api, name)
    raise AttributeError(f"module 'tailguard' has no attribute {name!r}")
