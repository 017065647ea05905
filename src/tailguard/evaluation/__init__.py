"""What an agent is worth: backtests, measures, significance, and the report that says it."""

from tailguard.evaluation import measures, significance
from tailguard.evaluation.backtest import Backtest, backtest

__all__ = ["Backtest", "backtest", "measures", "significance"]
