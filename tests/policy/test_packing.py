"""Turning matrices, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tailguard.policy.packing import turn


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("width", [1, 3, 16, 37])
@pytest.mark.parametrize("height", [0, 15, 16, 17, 64])
def test_a_matrix_is_turned_into_its_transpose(height: int, width: int, added: bool) -> None:
    rng = np.random.default_rng(0)
    matrix = rng.normal(size=(height, width)).astype(np.float32)
    room = rng.normal(size=(width + 1, height + 5)).astype(np.float32)
    before = room.copy()
    turn(matrix, added, room[:width, :height])
    assert_array_equal(room[:width, :height], matrix.T + (before[:width, :height] if added else 0))
    assert_array_equal(room[width:], before[width:])  # and nothing beside it
    assert_array_equal(room[:, height:], before[:, height:])
