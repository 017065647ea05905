"""The search space: types and bounds as declared, and paths that exist."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailguard.errors import ConfigError
from tailguard.population import HyperparamConfig
from tailguard.population.space import FIXED, check_space, with_values
from tailguard.ppo import PPOConfig
from tailguard.schedules import Schedule


@st.composite
def parameters(draw: st.DrawFn) -> HyperparamConfig:
    low = draw(st.floats(1e-6, 50.0))
    high = low + draw(st.floats(2.0, 100.0))
    step = draw(st.none() | st.floats(0.01, 200.0))
    return HyperparamConfig(
        name="gamma",
        low=low,
        high=high,
        log=draw(st.booleans()),
        integer=draw(st.booleans()),
        perturb_step=step,
        resample_probability=draw(st.floats(0.0, 1.0)),
    )


@given(parameter=parameters(), seed=st.integers(0, 2**32))
def test_whatever_is_drawn_or_explored_is_in_the_declared_space(parameter: HyperparamConfig, seed: int) -> None:
    rng = np.random.default_rng(seed)
    value = parameter.sample(rng)
    for _ in range(20):
        assert parameter.holds(value)
        value = parameter.explore(value, rng)


def test_exploring_moves_also_at_a_bound_and_for_small_whole_numbers() -> None:
    rng = np.random.default_rng(0)
    whole = HyperparamConfig(name="n_epochs", low=1, high=3, integer=True, resample_probability=0.0)
    added = HyperparamConfig(name="ent_coef", low=0.0, high=1.0, perturb_step=0.1, resample_probability=0.0)
    chosen = HyperparamConfig(name="optimizer", values=("a", "b", "c"), resample_probability=0.0)
    for parameter, value in ((whole, 1), (whole, 2), (whole, 3), (added, 0.0), (added, 1.0), (chosen, "a")):
        for _ in range(10):
            assert parameter.explore(value, rng) != value


def test_a_logarithmic_range_is_drawn_evenly_by_order_of_magnitude() -> None:
    rng = np.random.default_rng(0)
    parameter = HyperparamConfig(name="learning_rate", low=1e-5, high=1e-1, log=True)
    drawn = np.log10([float(parameter.sample(rng)) for _ in range(2000)])
    assert np.median(drawn) == pytest.approx(-3.0, abs=0.1)


def test_a_value_at_a_path_is_changed_and_checked_and_the_rest_stays() -> None:
    config = PPOConfig(learning_rate=Schedule(start=1e-3), gamma=0.9)
    values = {"learning_rate.start": 2e-3, "critic.huber_kappa": 0.03, "optimizer_kwargs.weight_decay": 0.1}
    changed = with_values(config, values)
    assert changed.learning_rate == Schedule(start=2e-3)
    assert (changed.critic.huber_kappa, changed.gamma) == (0.03, 0.9)
    assert changed.optimizer_kwargs == {"weight_decay": 0.1}


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ({"name": "gama", "low": 0.9, "high": 0.99}, "no setting gama.*gamma"),
        ({"name": "critic.kappa", "low": 0.01, "high": 0.1}, "no setting critic.kappa"),
        ({"name": "vgs.alpha", "low": 0.01, "high": 0.1}, "vgs is None here"),
        ({"name": "gamma", "low": 0.9, "high": 1.5}, "search space reaches gamma=1.5, .*less than or equal to 1"),
        ({"name": "ppo.gamma", "low": 0.9, "high": 0.99}, "below `ppo`: write gamma"),
        ({"name": "optimizer_kwargs.sigma", "low": 0.1, "high": 0.5}, "no option 'sigma'"),
        *(({"name": name, "low": 1, "high": 2}, "cannot vary") for name in FIXED),
    ],
)
def test_a_space_the_learner_cannot_follow_is_refused_before_training(parameter: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_space([HyperparamConfig(**parameter)], PPOConfig())


def test_every_fixed_setting_exists() -> None:
    for path in FIXED:
        head, _, below = path.partition(".")
        assert head in PPOConfig.model_fields
        if below and head != "vgs":
            assert below in type(getattr(PPOConfig(), head)).model_fields


def test_a_setting_that_is_named_twice_is_refused() -> None:
    twice = [HyperparamConfig(name="gamma", low=0.9, high=0.99)] * 2
    with pytest.raises(ConfigError, match="more than once"):
        check_space(twice, PPOConfig())


@pytest.mark.parametrize(
    "range_",
    [
        {"low": 1.0},
        {"low": 2.0, "high": 1.0},
        {"values": (1,)},
        {"values": (1, 2), "low": 0.0},
        {"low": 0.0, "high": 1.0, "log": True},
        {"low": 0.0, "high": 1.0, "perturb_factors": ()},
    ],
)
def test_a_range_that_is_none_is_refused(range_: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="ent_coef"):
        HyperparamConfig(name="ent_coef", **range_)
