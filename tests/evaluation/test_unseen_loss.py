"""A verdict knows how long a record must be for the losses that the strategy may carry (M12)."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
from numpy.testing import assert_allclose

from benchmarks.judge import LAWS, LENGTHS, ONE, gaussian, rare_loss, record_of, skill_shares, true_sharpe
from tailguard.evaluation.unseen_loss import UNSEEN_LOSS, bars_to_stand, smallest_mean, unseen_loss
from tailguard.evaluation.verdict import NO_SKILL, SKILL, judge
from tailguard.losses.normal import normal_quantile
from tests.evaluation.results import assessed, foresight, market

BEFORE, AFTER = 0, 1
FLOORS = (0.0, UNSEEN_LOSS)


@pytest.mark.parametrize(("n_bars", "size"), [(250, 0.05), (1_000, 0.05), (1_000, 0.02)])
def test_gains_that_wait_for_their_loss_are_not_called_skill(n_bars, size):
    """Of 120 records 6 are 5 %; without the allowance the first cell has more than half of them."""
    shares = skill_shares(rare_loss(size)(np.random.default_rng(1), 120, n_bars), FLOORS)
    assert shares[BEFORE] > 0.07
    assert shares[AFTER] <= 0.05


def test_ordinary_records_are_judged_as_before():
    rng = np.random.default_rng(2)
    shares = skill_shares(gaussian(rng, 200, 500), FLOORS)
    assert shares[AFTER] <= 0.05
    power = skill_shares(true_sharpe(2.0, 0.01)(rng, 60, 1_008), FLOORS)
    assert power[AFTER] >= power[BEFORE] - 0.03 >= 0.85


@pytest.mark.slow
def test_no_cell_of_the_benchmark_calls_skill_in_more_than_one_record_of_twenty():
    rng = np.random.default_rng(0)
    for name, law in LAWS.items():
        for n_bars in LENGTHS:
            share = skill_shares(law(rng, 600, n_bars), FLOORS)[AFTER]
            assert share <= 0.05, (name, n_bars, share)
    power = skill_shares(true_sharpe(2.0, 0.01)(rng, 600, 1_008), FLOORS)
    assert power[AFTER] >= power[BEFORE] - 0.03


@pytest.mark.parametrize("expected_losses", [0.1, 0.5, 1.0, 2.0, 2.9])
@pytest.mark.parametrize("loss", [0.002, 0.05, 0.5])
def test_at_most_one_record_of_twenty_without_its_loss_passes_whatever_the_rate(expected_losses, loss):
    """Simulated sample means: the loss is missed with probability exp(-k), the mean is then k loss / n too good."""
    n, noise, draws = 1_000, 1e-4, 100_000
    rng = np.random.default_rng(0)
    missed = rng.random(draws) < np.exp(-expected_losses)
    means = rng.normal(expected_losses * loss / n, noise, draws)
    assert np.mean(missed & (means >= smallest_mean(noise, n, loss))) <= 0.052


def test_without_an_unseen_loss_it_is_the_test_of_the_mean_and_a_large_one_is_the_rule_of_three():
    assert_allclose(smallest_mean(1e-4, 1_000, 0.0), 1e-4 * normal_quantile(0.95))
    assert_allclose(smallest_mean(1e-9, 1_000, 0.1), 3.0 * 0.1 / 1_000, rtol=0.01)


def test_the_record_that_is_needed_is_the_shortest_that_stands():
    n = bars_to_stand(3e-4, 2e-5, 500, 0.1)
    assert 500 < n < 2_000
    assert smallest_mean(2e-5 * (500 / n) ** 0.5, n, 0.1) <= 3e-4
    assert smallest_mean(2e-5 * (500 / (n - 2)) ** 0.5, n - 2, 0.1) > 3e-4
    assert bars_to_stand(-1e-4, 2e-5, 500, 0.1) == inf


def test_the_loss_is_the_worst_known_bar_at_the_weights_held_and_no_less_than_a_share_of_them():
    moves = np.array([[0.01, -0.02], [-0.3, 0.1], [0.05, 0.4]])
    long, short, small = np.array([[1.0, 0.0]]), np.array([[0.0, -0.5]]), np.array([[0.1, 0.0]])
    assert_allclose(unseen_loss(long, moves), 0.3)
    assert_allclose(unseen_loss(short, moves), 0.2)
    assert_allclose(unseen_loss(small, moves), 0.03)
    assert_allclose(unseen_loss(small), 0.1 * UNSEEN_LOSS)
    assert_allclose(unseen_loss(np.concatenate([long, small]), moves), (0.3 + 0.03) / 2)
    assert_allclose(unseen_loss(np.zeros((3, 2))), UNSEEN_LOSS)
    assert_allclose(unseen_loss(np.full((1, 2), np.nan), moves), UNSEEN_LOSS)


def test_a_record_that_is_too_short_says_how_long_it_would_have_to_be():
    returns = np.random.default_rng(0).normal(1e-4, 5e-4, 1_000)
    own, hold = record_of(returns)
    verdict = judge(own, hold, ONE, n_resamples=300)
    assert verdict.headline == NO_SKILL
    assert verdict.too_short
    assert len(verdict.reasons) == 1
    assert "too short for the losses this strategy may carry" in verdict.reasons[0]
    assert f"{verdict.bars_needed:,.0f} bars would be needed" in verdict.reasons[0]
    again, hold = record_of(np.random.default_rng(0).normal(1e-4, 5e-4, int(1.3 * verdict.bars_needed)))
    assert judge(again, hold, ONE, n_resamples=300).headline == SKILL


def test_a_record_that_lost_is_finite_in_json_because_no_length_would_do():
    own, hold = record_of(np.random.default_rng(0).normal(-1e-3, 1e-3, 500))
    verdict = judge(own, hold, ONE, n_resamples=100)
    assert verdict.bars_needed == 0.0
    assert not verdict.too_short


def test_a_record_that_has_met_its_loss_is_judged_by_its_returns_alone():
    returns = np.random.default_rng(0).normal(1e-4, 5e-4, 1_000)
    returns[500] = -0.13
    own, hold = record_of(returns)
    verdict = judge(own, hold, ONE, n_resamples=300)
    assert not verdict.too_short
    assert not verdict.skill


def test_an_assessment_knows_the_worst_bar_before_its_record():
    """A fall of 40 % before the first decision is what the same weights may meet again."""
    bars = market()
    fallen = bars.scale_after(5, 0.6)
    calm, warned = (assessed(each, foresight(each, 0.56)).verdict for each in (bars, fallen))
    assert_allclose(calm.unseen_loss, UNSEEN_LOSS, atol=0.01)
    assert 0.15 < warned.unseen_loss < 0.3  # long half of the time
    assert calm.skill
