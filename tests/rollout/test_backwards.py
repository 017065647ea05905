"""The compiled flow from later steps to earlier ones is the sum that defines it, bit for bit."""

from __future__ import annotations

import numpy as np

from tailguard.rollout.backwards import flow_back


def test_sums_flow_back_step_by_step() -> None:
    rng = np.random.default_rng(0)
    terms, last = rng.normal(size=(50, 3)), rng.normal(size=3)
    carried = np.where(rng.uniform(size=(50, 3)) < 0.2, 0.0, 0.97)
    expected, running = np.zeros_like(terms), last
    for t in range(49, -1, -1):
        running = terms[t] + carried[t] * running
        expected[t] = running
    np.testing.assert_array_equal(flow_back(terms, carried, last), expected)


def test_an_endless_sum_does_not_reach_the_episode_before_it() -> None:
    terms, carried = np.array([[1.0], [2.0], [np.inf]]), np.array([[0.5], [0.0], [0.5]])
    np.testing.assert_array_equal(flow_back(terms, carried, np.zeros(1))[:, 0], [2.0, 2.0, np.inf])
