"""Alerts of a population, judged once per round; `for_updates` counts rounds here."""

from __future__ import annotations

from tailguard.health import metrics
from tailguard.health.alerts import Alert, above, below

POPULATION_ALERTS: tuple[Alert, ...] = (
    Alert(
        "warn/exploit_value_spike",
        metrics.EXPLOIT_VALUE_RATIO,
        above(2.0),
        "A copy's critics begin with more than twice their source's loss: it is not the agent that was chosen.",
        "Look for a part that is not copied with the weights (observation statistics, return scale), or for a varied "
        "setting that changes what a return is (gamma): narrow its range.",
    ),
    Alert(
        "warn/exploit_explained_variance_drop",
        metrics.EXPLOIT_EXPLAINED_VARIANCE_DROP,
        above(0.5),
        "A copy's critics no longer explain the returns that its source's critics explained.",
        "Look for a part that is not copied with the weights (observation statistics, return scale), or for a varied "
        "setting that changes what a return is (gamma): narrow its range.",
    ),
    Alert(
        "warn/stuck_population",
        metrics.BEST_SCORE_GAIN,
        below(1e-3),
        "The best score has not risen for many rounds: copying and exploring no longer find anything better.",
        "If this is all there is to earn, stop here. Otherwise widen the ranges of hyperparams, raise "
        "resample_probability or population_size, or look at score_steps: a score of few episodes is mostly luck.",
        for_updates=10,
    ),
    Alert(
        "warn/members_alike",
        metrics.MEMBERS_ALIKE,
        above(0.5),
        "All members have the same score, and it is none that they rose to: nobody is chosen and nobody copied.",
        "Look at one member's actions: policies that never act, or a score that does not see what they do, are all "
        "alike. Vary settings that matter, or widen their ranges. If everybody began with all there is to earn, the "
        "task is too easy to need a population.",
        for_updates=3,
    ),
)
