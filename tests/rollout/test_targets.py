"""C5 on arrays: critic targets are samples of the law of the return."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from tailguard.losses.risk import midpoint_levels, tail_levels
from tailguard.rollout.targets import draw_horizons, episode_ends, resample, return_law_samples, rewards_to_go

GAMMA = 0.9


def samples(
    rewards: list[float], dones: list[int], lam: float, law_at: float = 50.0, terminal: dict[int, float] | None = None
) -> np.ndarray:
    """Targets of one environment whose critic predicts law_at + t at every step t."""
    n = len(rewards)
    law = (law_at + np.arange(n + 1))[:, None, None] * np.ones((1, 1, 4))
    terminal_law = {(t, 0): np.full(4, value) for t, value in (terminal or {}).items()}
    return return_law_samples(
        np.array(rewards)[:, None],
        law,
        terminal_law,
        np.array(dones, bool)[:, None],
        GAMMA,
        lam,
        midpoint_levels(4),
        np.random.default_rng(0),
    )[:, 0]


def test_horizon_one_is_the_one_step_bellman_target() -> None:
    targets = samples([1.0, 2.0, 3.0], [0, 0, 0], lam=0.0)
    np.testing.assert_allclose(targets, [[1 + GAMMA * 51] * 4, [2 + GAMMA * 52] * 4, [3 + GAMMA * 53] * 4])


def test_an_endless_horizon_sums_to_the_rollouts_end_and_bootstraps_there() -> None:
    targets = samples([1.0, 2.0, 3.0], [0, 0, 0], lam=1.0)
    assert targets[0, 0] == pytest.approx(1 + GAMMA * 2 + GAMMA**2 * 3 + GAMMA**3 * 53)


def test_the_sum_stops_at_a_termination_with_nothing_ahead() -> None:
    targets = samples([1.0, 2.0, 100.0], [0, 1, 0], lam=1.0)
    np.testing.assert_allclose(targets[0], 1 + GAMMA * 2)
    np.testing.assert_allclose(targets[1], 2.0)
    np.testing.assert_allclose(targets[2], 100 + GAMMA * 53)


def test_a_truncation_bootstraps_from_its_terminal_observation() -> None:
    targets = samples([1.0, 2.0, 100.0], [0, 1, 0], lam=1.0, terminal={1: 30.0})
    np.testing.assert_allclose(targets[0], 1 + GAMMA * 2 + GAMMA**2 * 30)


def test_ends_and_sums_follow_the_episodes() -> None:
    dones = np.array([[0], [1], [0], [0]], bool)
    np.testing.assert_array_equal(episode_ends(dones)[:, 0], [2, 2, 4, 4])
    np.testing.assert_allclose(rewards_to_go(np.ones((4, 1)), dones, GAMMA)[:, 0], [1 + GAMMA, 1.0, 1 + GAMMA, 1.0])


def test_horizons_are_geometric() -> None:
    horizons = draw_horizons((200_000,), 0.95, np.random.default_rng(0))
    assert horizons.min() == 1
    assert horizons.mean() == pytest.approx(20.0, rel=0.02)


@pytest.mark.parametrize("levels", [midpoint_levels(32), tail_levels(32, 0.05)], ids=["midpoint", "tail"])
def test_resampling_keeps_mean_and_spread_of_a_law_which_its_quantiles_alone_do_not(levels: tuple[float, ...]) -> None:
    quantiles = stats.norm(2.0, 3.0).ppf(np.asarray(levels))
    rng = np.random.default_rng(0)
    drawn = np.concatenate([resample(quantiles, levels, rng) for _ in range(2000)])
    assert drawn.mean() == pytest.approx(2.0, abs=0.03)
    assert drawn.std() == pytest.approx(3.0, rel=0.01)
    if levels == midpoint_levels(32):
        assert quantiles.std() < 0.985 * 3.0
