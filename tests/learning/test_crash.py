"""The crash market: what a CVaR limit costs and whether it holds is known by dynamic programming."""

from __future__ import annotations

import pytest

from benchmarks.crash import LIMIT, goal, out_of_sample
from tests.learning.seeds import interquartile_mean, over_seeds

pytestmark = pytest.mark.slow


def mean_and_cvar(seed: int, limit: float | None) -> tuple[float, float]:
    found = out_of_sample(limit, seed)
    assert found["alerts"] == 0, f"seed {seed}"
    return found["mean"], found["cvar"]


@pytest.mark.parametrize("limit", [None, LIMIT])
def test_the_agent_takes_as_much_as_it_may_and_no_more(limit: float | None) -> None:
    """Without a limit, the risk-neutral optimum; with one, the best policy whose CVaR keeps it."""
    mean, cvar = interquartile_mean(over_seeds(mean_and_cvar, limit))
    assert mean == pytest.approx(goal(limit).mean, rel=0.1)
    assert cvar == pytest.approx(goal(limit).cvar, rel=0.1)
