"""Prices -> validated bars -> causal features -> splits. No torch."""

from tailguard.market.bars import Bars

__all__ = ["Bars"]
