"""F4: the return of a risk period, and the stream that adds up to its CVaR term."""

from __future__ import annotations

import numpy as np
import pytest

from tailguard.rollout.periods import risk_rewards, walk_periods

NEVER = np.zeros((6, 1), np.bool_)
NONE_YET = np.zeros(1)


def at(*steps: int) -> np.ndarray:
    """(6, 1) true at these steps."""
    marks = NEVER.copy()
    marks[list(steps)] = True
    return marks


REWARDS = np.array([[1.0], [2.0], [4.0], [8.0], [16.0], [32.0]])


def test_an_episode_is_a_period_whichever_way_it_ends() -> None:
    periods = walk_periods(REWARDS, at(1), at(4), NONE_YET, NONE_YET, None)
    np.testing.assert_array_equal(periods.returns, [3.0, 28.0])
    np.testing.assert_array_equal(periods.lengths, [2.0, 3.0])
    np.testing.assert_array_equal(periods.so_far[:, 0], [0, 1, 0, 4, 12, 0, 32])
    np.testing.assert_array_equal(periods.elapsed[:, 0], [0, 1, 0, 1, 2, 0, 1])
    np.testing.assert_array_equal(periods.ended, at(1, 4))
    assert not periods.cut.any()


def test_a_horizon_ends_periods_inside_an_episode_and_a_truncation_only_cuts_them() -> None:
    periods = walk_periods(REWARDS, at(), at(4), NONE_YET, NONE_YET, 2)
    np.testing.assert_array_equal(periods.returns, [3.0, 12.0])
    np.testing.assert_array_equal(periods.ended, at(1, 3))
    np.testing.assert_array_equal(periods.cut, at(4))
    np.testing.assert_array_equal(periods.so_far[:, 0], [0, 1, 0, 4, 0, 0, 32])


def test_ruin_completes_a_period_before_its_horizon() -> None:
    periods = walk_periods(REWARDS, at(2), at(), NONE_YET, NONE_YET, 5)
    np.testing.assert_array_equal(periods.returns, [7.0])
    np.testing.assert_array_equal(periods.ended, at(2))


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_a_period_goes_on_over_rollouts(cut: int) -> None:
    rng = np.random.default_rng(0)
    rewards, terminated = rng.normal(size=(12, 3)), rng.uniform(size=(12, 3)) < 0.2
    truncated = ~terminated & (rng.uniform(size=(12, 3)) < 0.2)
    whole = walk_periods(rewards, terminated, truncated, np.zeros(3), np.zeros(3), 4)
    first = walk_periods(rewards[:cut], terminated[:cut], truncated[:cut], np.zeros(3), np.zeros(3), 4)
    rest = walk_periods(rewards[cut:], terminated[cut:], truncated[cut:], first.so_far[-1], first.elapsed[-1], 4)
    np.testing.assert_allclose(np.concatenate([first.so_far[:-1], rest.so_far]), whole.so_far)
    np.testing.assert_allclose(np.concatenate([first.returns, rest.returns]), whole.returns)
    np.testing.assert_array_equal(np.concatenate([first.ended, rest.ended]), whole.ended)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("nu", [-1.0, 0.7])
def test_the_stream_of_a_period_telescopes_to_its_tail_term(alpha: float, nu: float) -> None:
    rng = np.random.default_rng(1)
    rewards = rng.normal(size=(25, 400))
    ends = np.zeros(rewards.shape, np.bool_)
    ends[-1] = True
    periods = walk_periods(rewards, ends, ~ends & False, np.zeros(400), np.zeros(400), None)
    stream = risk_rewards(rewards, periods.so_far[:-1], nu, alpha)
    x = rewards.sum(0)
    tail = lambda x: np.maximum(nu - x, 0.0) / alpha  # noqa: E731
    expected = x if alpha == 1.0 else tail(0.0) - tail(x)
    np.testing.assert_allclose(stream.sum(0), expected, atol=1e-9)


def test_only_steps_below_the_threshold_are_felt() -> None:
    stream = risk_rewards(np.array([[-1.0], [-1.0], [1.0]]), np.array([[2.0], [1.0], [0.0]]), 0.5, 0.1)
    np.testing.assert_allclose(stream[:, 0], [0.0, -5.0, 5.0])


@pytest.mark.parametrize("horizon", [None, 1, 4])
def test_periods_are_walked_step_by_step(horizon: int | None) -> None:
    """Bit for bit, also where a period had begun long ago and where a reward before it is no number."""
    rng = np.random.default_rng(1)
    for _ in range(50):
        n_steps, n_envs = int(rng.integers(1, 40)), int(rng.integers(1, 9))
        rewards, so_far = rng.normal(size=(n_steps, n_envs)), rng.normal(size=n_envs)
        rewards[rng.uniform(size=rewards.shape) < 0.02] = np.nan
        terminated, truncated = rng.uniform(size=(2, n_steps, n_envs)) < 0.15
        elapsed = rng.integers(0, 6, n_envs).astype(float)
        periods = walk_periods(rewards, terminated, truncated, so_far, elapsed, horizon)
        returns, lengths = [], []
        for t, n in np.ndindex(n_steps, n_envs):
            after, count = periods.so_far[t, n] + rewards[t, n], periods.elapsed[t, n] + 1.0
            end = terminated[t, n] or (truncated[t, n] if horizon is None else count >= horizon)
            assert periods.ended[t, n] == end
            assert periods.cut[t, n] == (truncated[t, n] and not end)
            over = end or truncated[t, n]
            expected = (0.0, 0.0) if over else (after, count)
            np.testing.assert_array_equal((periods.so_far[t + 1, n], periods.elapsed[t + 1, n]), expected)
            if end:
                returns.append(after)
                lengths.append(count)
        np.testing.assert_array_equal(periods.so_far[0], so_far)
        np.testing.assert_array_equal(periods.elapsed[0], elapsed)
        np.testing.assert_array_equal(periods.returns, returns)
        np.testing.assert_array_equal(periods.lengths, lengths)
