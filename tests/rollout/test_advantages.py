"""C1, C2, C4 on arrays: episode ends and the lambda trace."""

from __future__ import annotations

import numpy as np
import pytest

from tailguard.rollout.advantages import advantages, normalize_valid, successor_values

GAMMA, LAM = 0.9, 0.8


def one_env(
    rewards: list[float], terminated: list[int], truncated: list[int], terminal_value: float = 7.0
) -> np.ndarray:
    values = np.linspace(1.0, 2.0, len(rewards) + 1)[:, None]
    ends, cuts = np.array(terminated, bool)[:, None], np.array(truncated, bool)[:, None]
    successors = successor_values(values, np.where(cuts, terminal_value, 0.0), ends, cuts)
    return advantages(np.array(rewards)[:, None], values, successors, ends | cuts, GAMMA, LAM)[:, 0]


def test_advantages_equal_the_explicit_sum() -> None:
    rewards, values = [1.0, 2.0, 3.0], np.linspace(1.0, 2.0, 4)
    errors = [rewards[t] + GAMMA * values[t + 1] - values[t] for t in range(3)]
    expected = [sum((GAMMA * LAM) ** k * errors[t + k] for k in range(3 - t)) for t in range(3)]
    np.testing.assert_allclose(one_env(rewards, [0, 0, 0], [0, 0, 0]), expected)


@pytest.mark.parametrize("kind", ["terminated", "truncated"])
def test_a_reward_in_the_next_episode_never_reaches_this_one(kind: str) -> None:
    end, none = [0, 1, 0, 0], [0, 0, 0, 0]
    ends = (end, none) if kind == "terminated" else (none, end)
    quiet, loud = one_env([1.0, 1.0, 0.0, 0.0], *ends), one_env([1.0, 1.0, 0.0, 100.0], *ends)
    np.testing.assert_array_equal(quiet[:2], loud[:2])
    assert loud[2] > quiet[2]


def test_termination_has_no_successor_and_truncation_has_the_terminal_observations_value() -> None:
    values = np.linspace(1.0, 2.0, 3)
    died, cut = one_env([1.0, 1.0], [0, 1], [0, 0]), one_env([1.0, 1.0], [0, 0], [0, 1], terminal_value=7.0)
    assert died[1] == pytest.approx(1.0 - values[1])
    assert cut[1] == pytest.approx(1.0 + GAMMA * 7.0 - values[1])


def test_advantages_are_normalized_over_valid_samples_only() -> None:
    values = np.array([[1.0, 2.0], [3.0, 1e9]])
    valid = np.array([[True, True], [True, False]])
    normalized = normalize_valid(values, valid)
    assert normalized[valid].mean() == pytest.approx(0.0, abs=1e-12)
    assert normalized[valid].std() == pytest.approx(1.0, rel=1e-6)
    assert normalized[1, 1] == 0.0


def test_a_single_valid_sample_is_left_alone() -> None:
    assert normalize_valid(np.array([[5.0, 1.0]]), np.array([[True, False]]))[0, 0] == 5.0
