"""Recurrences over the steps of a rollout: what they sum, and the native core against its reference bit for bit."""

from __future__ import annotations

import numpy as np

from tailguard.kernels.reference import scans as reference
from tailguard.kernels.scans import reverse_scan


def test_reverse_scan_equals_its_reference_bit_by_bit() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        shape = int(rng.integers(0, 40)), int(rng.integers(1, 9))
        terms, last = rng.normal(size=shape), rng.normal(size=shape[1])
        carried = rng.uniform(size=shape) * (rng.uniform(size=shape) > 0.2)
        last[carried[-1] == 0.0 if len(carried) else ...] = np.nan  # what is not carried must not arrive
        np.testing.assert_array_equal(reverse_scan(terms, carried, last), reference.reverse_scan(terms, carried, last))


def test_a_reverse_scan_is_a_sum_from_the_last_step_to_the_first() -> None:
    rng = np.random.default_rng(0)
    terms, last = rng.normal(size=(50, 3)), rng.normal(size=3)
    carried = np.where(rng.uniform(size=(50, 3)) < 0.2, 0.0, 0.97)
    expected, running = np.zeros_like(terms), last
    for t in range(49, -1, -1):
        running = terms[t] + carried[t] * running
        expected[t] = running
    np.testing.assert_array_equal(reverse_scan(terms, carried, last), expected)


def test_an_infinite_sum_does_not_reach_the_episode_before_it() -> None:
    terms, carried = np.array([[1.0], [2.0], [np.inf]]), np.array([[0.5], [0.0], [0.5]])
    np.testing.assert_array_equal(reverse_scan(terms, carried, np.zeros(1))[:, 0], [2.0, 2.0, np.inf])
