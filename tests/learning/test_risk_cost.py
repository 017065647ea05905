"""What risk costs in time: a stream, a small value and no second pass through any trunk."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tailguard import DistributionalPPO
from tailguard.env import oracle_env
from tailguard.market.oracles import CrashMarket

pytestmark = pytest.mark.slow


def test_training_with_risk_on_takes_at_most_a_tenth_more_time() -> None:
    """CPU time of five updates, ten rounds by turns, medians: neighbours on the machine disturb both alike."""
    agents = {
        mode: DistributionalPPO(
            "MlpLstmPolicy", oracle_env(CrashMarket(), 32, 0, n_bars=20_000), seed=0, update_threads=1, risk=risk
        )
        for mode, risk in {
            "none": {"mode": "none"},
            "episode": {"mode": "episode", "alpha": 0.05, "cvar_limit": -0.04},
        }.items()
    }
    seconds: dict[str, list[float]] = {mode: [] for mode in agents}
    for _ in range(10):
        for mode, agent in agents.items():
            began = time.process_time()
            agent.learn(5 * 128 * 32, reset_num_timesteps=False)
            seconds[mode].append(time.process_time() - began)
    without, with_risk = (float(np.median(seconds[mode][1:])) for mode in ("none", "episode"))
    print(f"CPU time with risk over without: {with_risk / without:.3f}")
    assert with_risk <= 1.1 * without
