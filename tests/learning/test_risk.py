"""Risk where the answer is known in closed form: sizing one bet, and sizing 25 of them.

A step earns a X - a^2 / 2 with X ~ N(m, s^2). Only time is seen, so the best policy is one number, found by gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import norm

from tailguard import DistributionalPPO
from tests.environments import Sizing
from tests.learning.seeds import FALLING, interquartile_mean, over_seeds

pytestmark = pytest.mark.slow
MEAN, STD = 0.5, 0.2
SMALL: dict[str, Any] = {
    "learning_rate": FALLING,
    "n_epochs": 4,
    "gae_lambda": 0.5,
    "critic": {"twin": False, "n_quantiles": 8},
}


def kappa(alpha: float) -> float:
    """CVaR_alpha of N(0, 1) is -kappa."""
    return 0.0 if alpha == 1.0 else float(norm.pdf(norm.ppf(alpha)) / alpha)


def sized(
    seed: int, risk: dict[str, Any], length: int, updates: int, mean: float, std: float, most: float = 1.0
) -> Any:
    """(action, dual variable) after training; many environments, because few bets say anything of the tail."""
    env = Sizing(256, seed, mean, std, length, most)
    n_steps = 32 if length == 1 else 2 * length
    # exploration is noise in the bet, so it must be gone in the end
    kwargs = {"net_arch": [16], "log_std_init": -1.5, "log_std_end": -4.0}
    model = DistributionalPPO("MlpPolicy", env, risk=risk, n_steps=n_steps, policy_kwargs=kwargs, seed=seed, **SMALL)
    model.learn(updates * n_steps * 256)
    action = model.predict((np.arange(length, dtype=np.float32) / length)[:, None], deterministic=True)[0]
    return float(action.mean()), float(getattr(model.risk, "dual", np.nan))


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.25, 1.0])
def test_one_bet_under_pure_cvar_is_sized_by_the_closed_form(alpha: float) -> None:
    """CVaR = a (m - kappa s) - a^2 / 2, so a = m - kappa s."""
    risk = {"mode": "episode", "alpha": alpha, "weight": 1.0}
    found = interquartile_mean(over_seeds(sized, risk, 1, 120, MEAN, STD))
    assert found[0] == pytest.approx(MEAN - kappa(alpha) * STD, abs=0.03)


def test_one_bet_under_a_limit_is_as_large_as_the_limit_allows_at_its_price() -> None:
    """a (m - kappa s) - a^2 / 2 >= 0 binds at a = 2 (m - kappa s), and the price is that of the last bit of CVaR."""
    alpha = 0.1
    safe = MEAN - kappa(alpha) * STD
    size = 2.0 * safe
    risk = {"mode": "episode", "alpha": alpha, "cvar_limit": 0.0}
    found = interquartile_mean(over_seeds(sized, risk, 1, 150, MEAN, STD))
    assert found[0] == pytest.approx(size, abs=0.03)
    assert found[1] == pytest.approx((MEAN - size) / (size - safe), rel=0.1)


@pytest.mark.parametrize("mode", ["episode", "nested", "none"])
def test_25_bets_are_sized_by_the_risk_of_their_sum_or_of_each(mode: str) -> None:
    """Noise averages out over a period and not over a step: CVaR of the sum allows a bet that no single one does."""
    length, mean, std, alpha = 25, 0.1, 0.2, 0.1
    expected = {"episode": mean - kappa(alpha) * std / np.sqrt(length), "nested": 0.0, "none": mean}[mode]
    risk = {"mode": mode, "alpha": alpha, "weight": 1.0} if mode != "none" else {"mode": "none"}
    found = interquartile_mean(over_seeds(sized, risk, length, 300 if mode == "nested" else 150, mean, std, 0.3))
    assert found[0] == pytest.approx(expected, abs=0.015)
