"""Prices -> validated bars -> causal features -> splits. No torch."""

from tailguard.market.bars import Bars
from tailguard.market.sources import load_bars

__all__ = ["Bars", "load_bars"]
