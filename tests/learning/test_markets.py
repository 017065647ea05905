"""Out of sample, as a fraction of the optimum: what an agent learns in markets whose best policy is known."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.oracles import blind
from tailguard.env import OracleScore
from tailguard.presets import preset
from tests.learning.seeds import heard_by, interquartile_mean, over_seeds

pytestmark = pytest.mark.slow


def trained_score(seed: int, name: str, policy: str = "MlpLstmPolicy") -> OracleScore:
    """A healthy training raises no alert: this is where zero false alarms are held to."""
    chosen = preset(name)
    agent = chosen.agent(seed, policy)
    heard = heard_by(agent)
    agent.learn(chosen.total_timesteps)
    assert heard == [], f"{name}, seed {seed}"
    return chosen.score(agent, seed)


@pytest.mark.parametrize(
    ("name", "least"), [("signal", 0.95), ("regime", 0.95), ("regime_hard", 0.90), ("pairs", 0.80)]
)
def test_the_agent_reaches_most_of_the_optimum(name: str, least: float) -> None:
    fractions = [score.fraction for score in over_seeds(trained_score, name)]
    assert interquartile_mean(fractions) >= least


def blind_fraction(seed: int) -> float:
    return blind("regime", "MlpPolicy", {}, None, seed)["fraction"]


def test_without_memory_a_hidden_regime_cannot_be_traded() -> None:
    """The weight held is not shown: an agent that sees it can keep its opinion there, and does (next test)."""
    assert interquartile_mean(over_seeds(blind_fraction)) <= 0.20


def test_the_weight_held_is_a_poor_memory() -> None:
    fractions = [score.fraction for score in over_seeds(trained_score, "regime", "MlpPolicy")]
    assert 0.20 < interquartile_mean(fractions) <= 0.80


def test_where_there_is_nothing_to_earn_it_learns_not_to_trade() -> None:
    scores = over_seeds(trained_score, "noise")
    earned = np.array([score.reward_per_step for score in scores])
    spread = np.array([score.stderr for score in scores])
    assert abs(earned.mean()) <= 1.96 * np.sqrt(np.square(spread).mean())  # an agent's own interval holds zero
    assert earned.mean() >= -0.5e-4  # and it is a narrow one: trading at random costs ten times that
