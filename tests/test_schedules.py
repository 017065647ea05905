"""E5, E6: schedules, the entropy coefficient and the KL controller."""

from __future__ import annotations

import pytest
import torch

from tailguard import DistributionalPPO
from tailguard.schedules import EntropyCoefficient, EntropyConfig, KLPenalty, KLPenaltyConfig, Schedule, value_at
from tests.agents import TINY_POLICY, logged
from tests.environments import cartpole


def test_schedules_reach_both_ends() -> None:
    for shape in ("linear", "cosine"):
        schedule = Schedule(shape=shape, start=1.0, end=0.2)
        assert [schedule.at(p) for p in (0.0, 1.0)] == pytest.approx([1.0, 0.2])
        assert schedule.at(0.5) == pytest.approx(0.6)


def test_constants_schedules_and_functions_of_remaining_progress_are_read_alike() -> None:
    assert value_at(0.3, 0.5) == 0.3
    assert value_at(Schedule(start=1.0, end=0.0), 0.25) == 0.75
    assert value_at(lambda remaining: remaining * 2.0, 0.25) == 1.5


def test_a_function_is_not_asked_beyond_the_end_of_training_which_the_last_rollout_may_pass() -> None:
    assert value_at(lambda remaining: 1e-3 * remaining, 1.007) == 0.0


def decayed(config: EntropyConfig, entropies: list[float], initial: float = 1.0) -> list[float]:
    coefficient = EntropyCoefficient(initial, config)
    values = []
    for entropy in entropies:
        coefficient.update(entropy, None)
        values.append(coefficient.value)
    return values


def test_decay_is_linear_and_stops_at_the_floor() -> None:
    values = decayed(EntropyConfig(ent_coef_min=0.2, decay_updates=4), [2.0, 1.5, 1.0, 0.5, 0.2, 0.1])
    assert values == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_without_decay_the_coefficient_is_constant() -> None:
    assert decayed(EntropyConfig(), [1.0] * 3) == [1.0] * 3


def test_a_plateau_delays_the_start_of_decay() -> None:
    config = EntropyConfig(decay_updates=4, plateau_window=2, plateau_tolerance=0.1)
    assert decayed(config, [1.0, 1.0, 1.0, 1.0, 0.5, 0.2]) == [1.0, 1.0, 1.0, 1.0, 0.75, 0.5]
    assert decayed(config, [2.0, 1.0, 0.0, -1.0]) == [1.0, 1.0, 0.75, 0.5]  # two updates are needed to know
    short = EntropyConfig(decay_updates=4, plateau_window=1, plateau_tolerance=0.1)
    assert decayed(short, [1.0, 1.0, 0.5, 0.5]) == [1.0, 1.0, 0.75, 0.5]


def test_once_begun_a_plateau_neither_stops_nor_speeds_up_decay() -> None:
    config = EntropyConfig(decay_updates=4, plateau_window=2, plateau_tolerance=0.1)
    steady = decayed(config, [2.0, 1.0, 0.0, -1.0, -2.0, -3.0])
    with_plateau = decayed(config, [2.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    assert steady == with_plateau == pytest.approx([1.0, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_at_the_floor_a_plateau_starts_nothing() -> None:
    config = EntropyConfig(ent_coef_min=1.0, decay_updates=4, plateau_window=1, plateau_tolerance=0.1)
    coefficient = EntropyCoefficient(1.0, config)
    for _ in range(6):
        coefficient.update(1.0, None)
    assert (coefficient.value, coefficient.decay_done) == (1.0, 0)


def test_the_boost_is_off_by_default_capped_and_floored() -> None:
    plain = EntropyCoefficient(0.01, EntropyConfig())
    plain.update(1.0, -5.0)
    assert plain.value == 0.01
    boosted = EntropyCoefficient(0.01, EntropyConfig(boost=100.0, boost_cap=0.05))
    boosted.update(1.0, -5.0)
    assert boosted.value == 0.05
    boosted.update(1.0, 0.9)
    assert boosted.value == 0.01
    above_cap = EntropyCoefficient(0.2, EntropyConfig(boost=2.0, boost_cap=0.05))
    above_cap.update(1.0, -5.0)
    assert above_cap.value == 0.2  # a cap never lowers what was set


def test_the_kl_controller_doubles_halves_and_rests() -> None:
    penalty = KLPenalty(KLPenaltyConfig(target=0.01, beta=1.0))
    penalty.update(0.02)
    assert penalty.beta == 2.0
    penalty.update(0.01)
    assert penalty.beta == 2.0
    penalty.update(0.001)
    assert penalty.beta == 1.0
    off = KLPenalty(KLPenaltyConfig())
    off.update(10.0)
    assert off.beta == 0.0


def test_controllers_keep_their_state() -> None:
    config = EntropyConfig(decay_updates=4, plateau_window=3)
    one, two = EntropyCoefficient(1.0, config), EntropyCoefficient(1.0, config)
    for entropy in (1.0, 0.9, 0.5):
        one.update(entropy, 0.3)
    two.load_state_dict(one.state_dict())
    one.update(0.5, 0.2)
    two.update(0.5, 0.2)
    assert one.state_dict() == two.state_dict()
    kl, twin = KLPenalty(KLPenaltyConfig(target=0.01)), KLPenalty(KLPenaltyConfig(target=0.01))
    kl.update(1.0)
    twin.load_state_dict(kl.state_dict())
    assert twin.beta == kl.beta == 2.0


def test_training_in_chunks_or_for_a_single_rollout_moves_the_weights_at_the_same_rate() -> None:
    """A rate that fell to 0 within each `learn` would be 0 in every call of a single rollout."""
    rates = []
    agent = DistributionalPPO("MlpLstmPolicy", cartpole(4, 0), n_steps=16, policy_kwargs=TINY_POLICY, seed=0)
    for steps in (3 * 64, 64, 64):
        before = torch.cat([weight.detach().reshape(-1).clone() for weight in agent.policy.parameters()])
        agent.learn(steps)
        after = torch.cat([weight.detach().reshape(-1) for weight in agent.policy.parameters()])
        assert not torch.equal(before, after)
        rates.append(logged(agent)["train/learning_rate"])
    assert rates == [1e-3] * 3
