"""A9: where rewards change their size for good the return scale can follow, and where it does not, that is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.callbacks import BaseCallback

from tailguard import DistributionalPPO
from tailguard.checkpoint import state_digest
from tailguard.errors import InertSettingError, StateError
from tailguard.normalization import ReturnScale, ReturnScaleConfig
from tests.agents import logged, tiny_agent
from tests.environments import NoiseChain, cartpole, vectorized

N_UPDATES, N_ENVS, N_STEPS = 160, 8, 32
LARGE_FOR = 21  # updates: 13 % of the training
SHRINKS = 40.0


class Shrinking(NoiseChain):
    """Rewards that become 40 times smaller, once and for good."""

    steps = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, *rest = super().step(action)
        self.steps += 1
        return obs, reward if self.steps <= LARGE_FOR * N_STEPS else reward / SHRINKS, *rest  # type: ignore[return-value]


class Figures(BaseCallback):
    """What every update logged, and the alerts that began."""

    model: DistributionalPPO

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []
        self.began: list[str] = []

    def _on_training_start(self) -> None:
        self.model.alerts.listeners.append(lambda alert, value: self.began.append(alert.name))

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.rows.append(dict(logged(self.model)))

    def last(self, n: int, name: str) -> np.ndarray:
        """(n,) one figure, in the last updates."""
        return np.array([row[name] for row in self.rows[-n:] if name in row])


def trained(horizon: int | None) -> tuple[DistributionalPPO, Figures]:
    agent, figures = (
        tiny_agent(
            vectorized(lambda: Shrinking(0.5), N_ENVS, 0),
            gamma=0.5,
            learning_rate=3e-3,
            n_epochs=4,
            critic={"n_quantiles": 16},
            return_scale={"horizon": horizon},
        ),
        Figures(),
    )
    agent.learn(N_UPDATES * N_ENVS * N_STEPS, figures, log_interval=10**6)  # nothing clears what was logged
    return agent, figures


def worst_share(figures: Figures, n: int = 60) -> float:
    """Largest distance of a quantile's level from its mean coverage, whatever tolerance a metric may have."""
    levels = (0.05, 0.25, 0.5, 0.75, 0.95)
    shares = (figures.last(n, f"risk/coverage_{round(100 * level):02d}").mean() for level in levels)
    return max(abs(share - level) for share, level in zip(shares, levels, strict=True))


def test_with_a_horizon_the_scale_follows_rewards_that_shrink_and_quantiles_are_calibrated_again() -> None:
    agent, figures = trained(20)
    spread = agent.rollout_buffer.returns.std()
    kappa = agent.config.critic.huber_kappa * agent.return_scale.snapshot.std
    assert kappa <= 0.05 * spread
    assert agent.config.critic.huber_kappa * figures.last(60, "train/return_scale_ratio").max() <= 0.05
    assert worst_share(figures) < 0.022
    assert figures.last(60, "risk/coverage_error").mean() < 0.065
    assert figures.began == []


def test_without_a_horizon_a_stale_scale_hides_nothing_and_is_said_with_what_to_do() -> None:
    agent, figures = trained(None)
    spread = agent.rollout_buffer.returns.std()
    assert agent.config.critic.huber_kappa * agent.return_scale.snapshot.std > 0.25 * spread
    assert worst_share(figures) > 0.024
    assert figures.last(60, "risk/coverage_error").mean() > 0.065  # and not zero in units of a std of long ago
    assert figures.began == ["warn/return_scale_stale"]
    (alert,) = (alert for alert in agent.alerts.alerts if alert.name == "warn/return_scale_stale")
    assert "horizon" in alert.advice


# the statistics

PARTS = st.lists(
    st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=8).map(np.array), min_size=1, max_size=12
)  # the returns of every update


@given(PARTS, st.integers(1, 14))
def test_what_is_remembered_is_exactly_the_last_updates(parts: list[np.ndarray], horizon: int) -> None:
    scale = ReturnScale(ReturnScaleConfig(horizon=horizon))
    for part in parts:
        scale.update(part)
    together = np.concatenate(parts[-horizon:])
    assert scale.count == together.size
    assert scale.snapshot.mean == pytest.approx(together.mean(), rel=1e-9, abs=1e-8)
    assert scale.snapshot.std == pytest.approx(max(together.std(), 1e-6), rel=1e-6, abs=1e-4)


def test_updates_without_a_valid_return_are_not_counted() -> None:
    scale = ReturnScale(ReturnScaleConfig(horizon=2))
    for part in ([1.0, 3.0], [], [], [5.0, 7.0]):
        scale.update(np.array(part))
    assert scale.snapshot.mean == pytest.approx(4.0)


def test_a_state_saved_without_a_horizon_is_forgotten_like_one_update() -> None:
    old = ReturnScale()
    for part in ([100.0, 300.0], [-500.0, 900.0]):
        old.update(np.array(part))
    new = ReturnScale(ReturnScaleConfig(horizon=2))
    new.load_state_dict(old.state_dict())
    assert new.snapshot == old.snapshot
    new.update(np.array([1.0, 3.0]))
    assert new.count == 6
    new.update(np.array([1.0, 3.0]))
    assert new.snapshot == (2.0, 1.0)


def test_a_state_saved_with_a_horizon_goes_on_without_one() -> None:
    old = ReturnScale(ReturnScaleConfig(horizon=1))
    for part in ([1e6, 2e6], [1.0, 3.0]):
        old.update(np.array(part))
    new = ReturnScale()
    new.load_state_dict(old.state_dict())
    new.update(np.array([5.0, 7.0]))
    assert new.snapshot.mean == pytest.approx(4.0)
    assert "recent" not in new.state_dict()


@pytest.mark.parametrize("row", [[0.0, 1.0, 1.0], [2.0, np.nan, 1.0], [2.0, 1.0, -1.0]])
def test_a_memory_that_no_training_arrives_at_is_refused(row: list[float]) -> None:
    scale = ReturnScale(ReturnScaleConfig(horizon=3))
    scale.update(np.array([1.0, 2.0]))
    with pytest.raises(StateError, match="recent"):
        scale.load_state_dict({**scale.state_dict(), "recent": np.array([row])})


def test_a_horizon_is_refused_where_nothing_is_scaled() -> None:
    with pytest.raises(InertSettingError, match=r"return_scale\.horizon"):
        tiny_agent(return_scale={"enabled": False, "horizon": 5})


# on agents


@pytest.mark.parametrize(
    "risk", [{}, {"mode": "episode", "weight": 0.5, "alpha": 0.25, "horizon": 8}], ids=["", "risk"]
)
def test_a_training_with_a_horizon_resumes_exactly(risk: dict[str, Any], tmp_path: Path) -> None:
    def env() -> Any:
        return cartpole(4, 0)

    size = 4 * N_STEPS
    whole = tiny_agent(env(), return_scale={"horizon": 3}, risk=risk)
    whole.learn(5 * size)
    whole.checkpoint(tmp_path / "half")
    again = DistributionalPPO.resume(tmp_path / "half", env())
    assert again.config.return_scale.horizon == 3
    assert len(again.return_scale.recent) == 3
    for agent in (whole, again):
        agent.learn(9 * size, reset_num_timesteps=False)
    one, two = ({name: part.state_dict() for name, part in agent.parts().items()} for agent in (whole, again))
    assert state_digest(one) == state_digest(two)
    assert whole.return_scale.count == 3 * size


def test_an_agent_saved_without_a_horizon_can_be_given_one(tmp_path: Path) -> None:
    tiny_agent().learn(3 * 4 * N_STEPS).save(tmp_path / "agent")
    agent = DistributionalPPO.load(tmp_path / "agent", cartpole(4, 0), return_scale={"horizon": 2})
    before = agent.return_scale.snapshot
    agent.learn(4 * N_STEPS)
    assert agent.return_scale.count == 4 * 4 * N_STEPS  # all of the past counts as one update ...
    assert agent.return_scale.snapshot != before
    agent.learn(4 * N_STEPS)
    assert agent.return_scale.count == 2 * 4 * N_STEPS  # ... and is forgotten as one
