"""Markets whose optimal policy is known, so that a result is a fraction of the optimum. See docs/oracle-markets.md.

    market = oracle_market("regime", drift_bps=15, switch_probability=0.01)
    market.optimum.reward_per_step     # what the best policy earns per bar, net of costs
    market.policy()                    # that policy, with SB3's `predict`
    market.bars(10_000, seed=1)        # a draw of the market

`tailguard.env.oracle_env(market, n_envs, seed)` trades it.
"""

from __future__ import annotations

from typing import Any

from tailguard.errors import ConfigError, did_you_mean
from tailguard.market.oracles.base import OptimalPolicy, Optimum, OracleMarket, Path
from tailguard.market.oracles.crash import ConstantWeight, CrashMarket, TailOptimum
from tailguard.market.oracles.pairs import PairsMarket
from tailguard.market.oracles.single import NoiseMarket, RegimeMarket, SignalMarket

MARKETS: dict[str, type[OracleMarket]] = {
    market.kind: market for market in (SignalMarket, RegimeMarket, CrashMarket, NoiseMarket, PairsMarket)
}

__all__ = [
    "MARKETS",
    "ConstantWeight",
    "CrashMarket",
    "NoiseMarket",
    "OptimalPolicy",
    "Optimum",
    "OracleMarket",
    "PairsMarket",
    "Path",
    "RegimeMarket",
    "SignalMarket",
    "TailOptimum",
    "oracle_market",
]


def oracle_market(name: str, **constants: Any) -> OracleMarket:
    """The market `name`, one of signal, regime, crash, noise, pairs; constants not given keep their defaults."""
    if name not in MARKETS:
        raise ConfigError(
            f"No oracle market is called {name!r}; there are {', '.join(MARKETS)}.{did_you_mean(name, MARKETS)}"
        )
    return MARKETS[name](**constants)
