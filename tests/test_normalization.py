"""A3, A5, A7: the return scale."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.vec_env import VecNormalize

from tailguard.errors import ConfigError, StateError
from tailguard.normalization import ReturnScale, ReturnScaleConfig, refuse_two_return_scales
from tests.environments import NoiseChain, vectorized


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=60), st.integers(0, 60))
def test_statistics_do_not_depend_on_how_the_data_is_split(data: list[float], at: int) -> None:
    returns = np.array(data)
    whole, split = ReturnScale(), ReturnScale()
    whole.merge(returns)
    split.merge(returns[:at])
    split.merge(returns[at:])
    assert split.mean == pytest.approx(whole.mean, rel=1e-9, abs=1e-6)
    assert split.std == pytest.approx(whole.std, rel=1e-6, abs=1e-4)
    assert whole.std == pytest.approx(max(returns.std(), 1e-6), rel=1e-6, abs=1e-4)


def test_sigma_has_a_floor() -> None:
    scale = ReturnScale(ReturnScaleConfig(min_std=0.5))
    scale.update(np.full(10, 3.0))
    assert scale.snapshot == (3.0, 0.5)


def test_sigma_moves_at_most_by_its_cap_per_update() -> None:
    scale = ReturnScale(ReturnScaleConfig(max_change=2.0))
    scale.update(np.array([-1.0, 1.0]))
    scale.update(np.array([-100.0, 100.0]))
    assert scale.snapshot.std == 2.0
    scale.update(np.array([-100.0, 100.0]))
    assert scale.snapshot.std == 4.0


def test_the_snapshot_equals_the_statistics_after_an_update() -> None:
    scale = ReturnScale()
    scale.update(np.array([1.0, 2.0, 6.0]))
    assert scale.snapshot.mean == pytest.approx(3.0)
    assert scale.snapshot.std == pytest.approx(np.std([1.0, 2.0, 6.0]))


def test_calibration_sets_a_unit_but_counts_nothing() -> None:
    scale = ReturnScale()
    scale.calibrate(np.array([10.0, 30.0]))
    assert scale.snapshot == (20.0, 10.0)
    assert scale.count == 0
    scale.update(np.array([1.0, 3.0]))
    assert scale.snapshot == (2.0, 1.0)
    scale.calibrate(np.array([10.0, 30.0]))  # only before the first update
    assert scale.snapshot == (2.0, 1.0)


def test_a_state_round_trip_is_exact_and_strict() -> None:
    scale, twin = ReturnScale(), ReturnScale()
    scale.update(np.array([0.1, 0.7, 12.3]))
    twin.load_state_dict(scale.state_dict())
    assert twin.state_dict() == scale.state_dict()
    with pytest.raises(StateError, match="missing"):
        twin.load_state_dict({"count": 1})


def test_two_return_scales_are_refused_with_the_names_of_both_switches() -> None:
    normalizer = VecNormalize(vectorized(NoiseChain, 1), norm_reward=True)
    with pytest.raises(ConfigError, match=r"norm_reward=False.*return_scale"):
        refuse_two_return_scales(normalizer, ReturnScaleConfig())
    refuse_two_return_scales(normalizer, ReturnScaleConfig(enabled=False))
    refuse_two_return_scales(None, ReturnScaleConfig())
