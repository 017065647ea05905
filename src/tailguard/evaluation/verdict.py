"""The verdict: whether out-of-sample returns are evidence of skill. It is allowed to say no, and usually does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tailguard.evaluation import measures
from tailguard.evaluation.backtest import Backtest
from tailguard.evaluation.ledger import TrialCount
from tailguard.evaluation.significance import (
    Interval,
    alpha_interval,
    bootstrap_moments,
    deflated_sharpe,
    expected_best_sharpe,
    min_track_record_bars,
    sharpe_interval,
)

SKILL = "Evidence of skill"
NO_SKILL = "No evidence of skill"
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Verdict:
    """What the returns say, and why."""

    headline: str
    reasons: tuple[str, ...]
    sharpe: Interval
    """Annualised, with its 95 % interval."""
    alpha: Interval
    """Yearly return that holding the market does not explain, with its 95 % interval."""
    beta: float
    deflated_sharpe: float
    n_trials: int
    n_looks: int
    best_of_luck: float
    """Annualised Sharpe ratio to expect from the best of as many trials without skill."""

    @property
    def skill(self) -> bool:
        return self.headline == SKILL


def judge(
    strategy: Backtest, hold: Backtest, trials: TrialCount, *, n_resamples: int = 2_000, seed: int = 0
) -> Verdict:
    """Skill needs three things at once: a Sharpe ratio above zero, above luck among trials, and beyond the market."""
    rate, returns = strategy.bars_per_year, strategy.returns
    moments = bootstrap_moments(returns, hold.returns, n_resamples=n_resamples, seed=seed)
    sharpe = sharpe_interval(moments, measures.sharpe(returns, rate), rate, CONFIDENCE)
    fit = measures.market_fit(returns, hold.returns, rate)
    alpha = alpha_interval(moments, fit.alpha_per_year, rate, CONFIDENCE)
    per_bar, skew, kurtosis = measures.sharpe_per_bar(returns), measures.skewness(returns), measures.kurtosis(returns)
    deflated = deflated_sharpe(
        per_bar,
        len(returns),
        skew,
        kurtosis,
        n_trials=max(trials.n_trials, 1),
        trial_variance_per_bar=trials.sharpe_variance_per_bar,
    )
    luck = expected_best_sharpe(max(trials.n_trials, 1), trials.sharpe_variance_per_bar) * rate**0.5
    needed = min_track_record_bars(per_bar, skew, kurtosis, CONFIDENCE)
    against = doubts(strategy, sharpe, alpha, deflated, trials.n_trials, luck, needed)
    return Verdict(
        headline=NO_SKILL if against else SKILL,
        reasons=against or (support(sharpe, alpha, deflated, trials.n_trials),),
        sharpe=sharpe,
        alpha=alpha,
        beta=fit.beta,
        deflated_sharpe=deflated,
        n_trials=max(trials.n_trials, 1),
        n_looks=max(trials.n_looks, 1),
        best_of_luck=luck,
    )


def in_sample(verdict: Verdict) -> Verdict:
    """The same figures on bars the agent learned from: they are no evidence of anything."""
    return replace(verdict, headline=NO_SKILL, reasons=("In sample: the agent has learned from these very bars.",))


def doubts(
    strategy: Backtest, sharpe: Interval, alpha: Interval, deflated: float, n_trials: int, luck: float, needed: float
) -> tuple[str, ...]:
    """Every reason not to believe, in plain words; empty when there is none."""
    if not strategy.turnover.any():
        return ("It did not trade.",)
    if sharpe.high < 0.0:
        return (f"It loses money: even the upper end of its Sharpe ratio is {sharpe.high:.2f}.",)
    found = []
    if sharpe.low <= 0.0:
        more = (
            f" To be told from luck it would need {needed:,.0f} bars; there are {len(strategy):,}."
            if len(strategy) < needed < 1e9
            else ""
        )
        found.append(f"Its Sharpe ratio of {sharpe.estimate:.2f} may as well be zero: {span(sharpe)}.{more}")
    if deflated < CONFIDENCE:
        if n_trials > 1 and sharpe.low > 0.0:
            found.append(
                f"The best of {n_trials} trials without skill would reach {luck:.2f}; the probability of a true Sharpe "
                f"ratio above zero is only {deflated:.0%}."
            )
        elif sharpe.low > 0.0:
            found.append(f"The probability of a true Sharpe ratio above zero is only {deflated:.0%}.")
    if alpha.low <= 0.0 < sharpe.low:
        found.append(
            f"Holding the market explains it: what is left is {alpha.estimate:+.1%} a year, {span(alpha, '.1%')}."
        )
    return tuple(found)


def support(sharpe: Interval, alpha: Interval, deflated: float, n_trials: int) -> str:
    trials = "one trial" if n_trials <= 1 else f"{n_trials} trials"
    return (
        f"Sharpe ratio {sharpe.estimate:.2f}, {span(sharpe)}; {deflated:.1%} probable to be above zero after {trials}; "
        f"{alpha.estimate:+.1%} a year that holding the market does not explain, {span(alpha, '.1%')}."
    )


def span(interval: Interval, form: str = ".2f") -> str:
    """'95 % interval -0.10 to 1.20'."""
    return f"95 % interval {interval.low:{form}} to {interval.high:{form}}"
