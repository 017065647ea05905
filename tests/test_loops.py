"""What compiled loops tell each other across threads."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from tailguard.loops import add_one, borrowed, compiled, latest


@compiled
def count_up(counts, n):  # type: ignore[no-untyped-def]
    for _ in range(n):
        add_one(counts.ctypes.data + 8)


@compiled
def follow(counts, last):  # type: ignore[no-untyped-def]
    """The turns that it took to see the count arrive; a loop that did not look anew would never end."""
    turns = 0
    while latest(counts.ctypes.data + 8) < last:
        turns += 1
    return turns


def test_two_threads_count_and_a_third_sees_the_end() -> None:
    counts, n = np.zeros(3, np.int64), 200_000
    count_up(counts, 0)
    follow(counts, 0)
    with ThreadPoolExecutor(3) as pool:
        watching = pool.submit(follow, counts, 2 * n)
        for counting in [pool.submit(count_up, counts, n) for _ in range(2)]:
            counting.result()
        assert watching.result() >= 0
    assert counts.tolist() == [0, 2 * n, 0]


def test_a_count_is_told_as_it_was_before() -> None:
    @compiled  # type: ignore[untyped-decorator]
    def twice(counts):  # type: ignore[no-untyped-def]
        return add_one(counts.ctypes.data), add_one(counts.ctypes.data)

    assert twice(np.array([5], np.int64)) == (5, 6)


class Pair(NamedTuple):
    left: np.ndarray
    right: tuple[np.ndarray, int]


@compiled
def sum_of_slices(pair):  # type: ignore[no-untyped-def]
    """Slices of arrays that somebody else keeps."""
    left, (right, n) = borrowed(pair)
    for i in range(n):
        left[i:] += right[i]
    return left.sum()


def test_borrowed_arrays_are_the_same_memory_and_stay_with_their_owner() -> None:
    sum_of_slices(Pair(np.zeros(1), (np.zeros(1), 1)))  # compiling holds on to what it is shown
    left, right = np.zeros(4), np.arange(4.0)
    holders = sys.getrefcount(left), sys.getrefcount(right)
    assert sum_of_slices(Pair(left, (right, 4))) == 0 * 4 + 1 * 3 + 2 * 2 + 3 * 1
    np.testing.assert_array_equal(left, [0.0, 1.0, 3.0, 6.0])
    assert (sys.getrefcount(left), sys.getrefcount(right)) == holders
