"""The verdict says yes where there is skill, and no, with the reason, everywhere else."""

from __future__ import annotations

import numpy as np
import pytest

from tailguard.evaluation.backtest import buy_and_hold, follow_targets
from tailguard.evaluation.ledger import TrialCount
from tailguard.evaluation.verdict import NO_SKILL, SKILL, judge
from tests.evaluation.results import FEES, ONE, RULES, foresight, market


def verdict_of(bars, strategy, trials=ONE):
    hold = buy_and_hold(bars, strategy.first, len(strategy), costs=FEES, account=RULES)
    return judge(strategy, hold, trials, n_resamples=500)


def test_foresight_is_skill():
    bars = market()
    verdict = verdict_of(bars, foresight(bars, 0.56))
    assert verdict.headline == SKILL
    assert verdict.skill
    assert verdict.sharpe.low > 0
    assert verdict.alpha.low > 0
    assert "after one trial" in verdict.reasons[0]


def test_a_coin_is_not_skill_whatever_its_luck():
    bars = market()
    verdicts = [verdict_of(bars, foresight(bars, 0.5, seed)) for seed in range(40)]
    assert sum(v.skill for v in verdicts) <= 4  # 2.5 % of coins look good in one trial
    assert all(v.reasons for v in verdicts)


def test_what_one_trial_shows_many_trials_do_not():
    """The Sharpe ratio of a lucky coin among fifty is what the best of fifty reaches."""
    bars = market()
    coins = [foresight(bars, 0.5, seed, FEES.replace(fee_bps=0)) for seed in range(200, 250)]
    sharpes = [c.returns.mean() / c.returns.std(ddof=1) for c in coins]
    lucky = coins[int(np.argmax(sharpes))]
    assert verdict_of(bars, lucky).deflated_sharpe > 0.95
    fifty = verdict_of(bars, lucky, TrialCount(50, 50, float(np.var(sharpes, ddof=1))))
    assert fifty.deflated_sharpe < 0.8
    assert fifty.headline == NO_SKILL
    assert any("The best of 50 trials without skill" in reason for reason in fifty.reasons)


def test_being_long_in_a_rising_market_is_not_skill():
    bars = market(drift=1.2e-3)
    verdict = verdict_of(bars, follow_targets(bars, np.full((2_900, 1), 0.8), 10, costs=FEES, account=RULES))
    assert verdict.headline == NO_SKILL
    assert verdict.sharpe.low > 0
    assert verdict.beta == pytest.approx(0.8, abs=0.01)
    assert "Holding the market explains it" in verdict.reasons[0]


def test_not_trading_and_losing_are_said_plainly():
    bars = market()
    idle = verdict_of(bars, follow_targets(bars, np.zeros((2_000, 1)), 10, costs=FEES, account=RULES))
    assert idle.reasons == ("It did not trade.",)
    loser = verdict_of(bars, foresight(bars, 0.4))
    assert loser.headline == NO_SKILL
    assert loser.reasons[0].startswith("It loses money")


def test_a_short_record_says_how_many_bars_it_would_need():
    bars = market(250)
    verdict = verdict_of(bars, foresight(bars, 0.54, seed=3))
    assert verdict.headline == NO_SKILL
    assert "To be told from luck it would need" in verdict.reasons[0]
