"""The verdict: whether out-of-sample returns are evidence of skill. It is allowed to say no, and usually does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

from tailguard.evaluation import measures
from tailguard.evaluation.backtest import Backtest
from tailguard.evaluation.comparison import (
    AGENT,
    HOLD,
    RIDGE,
    TRAIN,
    PartResult,
    memorised,
    of_strategy,
    rule_is_enough,
)
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
from tailguard.evaluation.unseen_loss import bars_to_stand, smallest_mean, unseen_loss

SKILL = "Evidence of skill"
NO_SKILL = "No evidence of skill"
CONFIDENCE = 0.95
COSTLY = 0.5
"""Part of the gross profit from which on costs are said first."""


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
    mean_stderr: float = 0.0
    """Standard error of the mean return of a bar, from the same resamples as the intervals."""
    unseen_loss: float = 0.0
    """Loss of one bar, as a part of equity, that the strategy may meet although the record has not."""
    bars_needed: float = 0.0
    """Length at which a record of this mean and noise would stand such a loss; 0 where no length would do."""
    too_short: bool = False
    """Whether the record is shorter than that."""
    memorised: bool = False
    """Whether the agent kept less than half of the Sharpe ratio that it has on the bars it learned from."""
    enough: str = ""
    """The simple rule that does as well as the agent; empty when there is none, or none was compared."""
    cost_share: float = 0.0
    """Costs as a part of the gross profit; 0 without a gross profit."""

    @property
    def skill(self) -> bool:
        return self.headline == SKILL


def judge(
    strategy: Backtest,
    hold: Backtest,
    trials: TrialCount,
    *,
    may_lose: float | None = None,
    comparison: Sequence[PartResult] = (),
    n_resamples: int = 2_000,
    seed: int = 0,
) -> Verdict:
    """Skill needs four things at once: a Sharpe ratio above zero, above luck among trials, beyond the market, and over
    a record that is long enough for the losses that the strategy may carry.

    may_lose:   loss of one bar to allow for, as a part of equity; None for what `unseen_loss` says of the weights held
    comparison: the agent and simple rules on train and on the bars judged, which are its last part
    """
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
    loss = unseen_loss(strategy.weights) if may_lose is None else may_lose
    noise = float(moments.mean.std())
    short = tail_doubt(strategy, noise, loss)
    enough = bars_to_stand(float(returns.mean()), noise, len(returns), loss)
    against = doubts(strategy, sharpe, alpha, deflated, trials.n_trials, luck, needed)
    if not against or sharpe.low > 0.0:
        against += short
    by_heart, no_agent = memory_reason(comparison), rule_reason(comparison)
    reasons = against or (support(sharpe, alpha, deflated, trials.n_trials),)
    return Verdict(
        headline=NO_SKILL if against else SKILL,
        reasons=(*costs_reason(strategy), *by_heart, *reasons, *no_agent),
        sharpe=sharpe,
        alpha=alpha,
        beta=fit.beta,
        deflated_sharpe=deflated,
        n_trials=max(trials.n_trials, 1),
        n_looks=max(trials.n_looks, 1),
        best_of_luck=luck,
        mean_stderr=noise,
        unseen_loss=loss,
        bars_needed=enough if isfinite(enough) else 0.0,
        too_short=bool(short),
        memorised=bool(by_heart),
        enough=rule_enough(comparison),
        cost_share=cost_share(strategy),
    )


def cost_share(strategy: Backtest) -> float:
    """Costs as a part of what was earned before them; 0 where nothing was."""
    costs = float(strategy.costs.sum())
    gross = float(strategy.returns.sum()) + costs
    return costs / gross if gross > 0.0 else 0.0


def costs_reason(strategy: Backtest) -> tuple[str, ...]:
    """That costs eat most of the gross profit, and what to change; empty when they do not."""
    share = cost_share(strategy)
    if share <= COSTLY:
        return ()
    eaten = f"{share:.0%} of its gross profit" if share <= 1.0 else f"all of its gross profit ({share:,.1f} times it)"
    return (
        f"It trades too much: costs eat {eaten}, because it trades {strategy.turnover_per_year:,.0f} times its equity "
        f"a year at {strategy.cost_bps:.1f} bps. Train with a no-trade band (--set data.account.no_trade_band=0.2) or "
        "on longer bars.",
    )


def memory_reason(comparison: Sequence[PartResult]) -> tuple[str, ...]:
    """That the agent knows its training bars by heart, and what to change; empty when it does not."""
    parts = of_strategy(comparison, AGENT)
    if TRAIN not in parts or len(parts) < 2:
        return ()
    train, other = parts[TRAIN], list(parts.values())[-1]
    if not memorised(train, other):
        return ()
    return (
        f"It memorised its training bars: Sharpe ratio {train.sharpe:.2f} on train, {other.sharpe:.2f} on {other.part}."
        " Less memorises less: fewer steps, a lower learning rate, fewer features, a smaller network; or more bars.",
    )


def rule_enough(comparison: Sequence[PartResult]) -> str:
    """The name of the simple rule that does as well on the bars judged; empty when there is none."""
    agent = list(of_strategy(comparison, AGENT).values())
    for name in (HOLD, RIDGE):
        rule = list(of_strategy(comparison, name).values())
        if agent and rule and agent[-1].part != TRAIN and rule_is_enough(agent[-1], rule[-1]):
            return name
    return ""


def rule_reason(comparison: Sequence[PartResult]) -> tuple[str, ...]:
    """That a simple rule does as well, so that no agent is needed; empty when none does."""
    name = rule_enough(comparison)
    if not name:
        return ()
    agent, rule = (list(of_strategy(comparison, who).values())[-1] for who in (AGENT, name))
    words = "Holding the market" if name == HOLD else "A ridge regression on the same features"
    return (
        f"{words} does as well: Sharpe ratio {rule.sharpe:.2f} against {agent.sharpe:.2f} after the same costs, so no "
        "agent is needed.",
    )


def tail_doubt(strategy: Backtest, noise: float, loss: float) -> tuple[str, ...]:
    """Why the record cannot rule out a loss of this size that it has not met; empty when it can, or has met one.

    noise: standard error of the mean return of a bar
    """
    returns, n = strategy.returns, len(strategy)
    mean = float(returns.mean())
    if mean >= smallest_mean(noise, n, loss) or mean <= 0.0 or returns.min() <= -loss:
        return ()
    enough = bars_to_stand(mean, noise, n, loss)
    return (
        f"The record is too short for the losses this strategy may carry: its worst bar is {returns.min():.2%}, and "
        f"one loss of {loss:.1%} of equity every {loss / mean:,.0f} bars would leave nothing of its profit. A record "
        f"of {n:,} bars may well miss that; {enough:,.0f} bars would be needed.",
    )


def in_sample(verdict: Verdict) -> Verdict:
    """The same figures on bars the agent learned from: they are no evidence of anything."""
    return replace(
        verdict, headline=NO_SKILL, enough="", reasons=("In sample: the agent has learned from these very bars.",)
    )


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
