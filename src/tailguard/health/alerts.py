"""Alerts declared as data: which figure, when it is wrong, for how long, what it means and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from stable_baselines3.common.logger import Logger

from tailguard.health import metrics
from tailguard.health.metrics import Metric

Rule = Callable[[float], bool]


def above(limit: float) -> Rule:
    return lambda value: value > limit


def below(limit: float) -> Rule:
    return lambda value: value < limit


def outside(low: float, high: float) -> Rule:
    return lambda value: not low <= value <= high


@dataclass(frozen=True)
class Alert:
    """Fires after `for_updates` updates in a row in which the rule held for the metric."""

    name: str
    metric: Metric
    fires: Rule
    meaning: str
    advice: str
    for_updates: int = 1


ALERTS: tuple[Alert, ...] = (
    Alert(
        "warn/twin_critics_gradient_imbalance",
        metrics.CRITICS_GRAD_RATIO,
        outside(0.01, 100.0),
        "One twin critic receives far more gradient than the other, so the pair acts as a single critic.",
        "Compare the two heads' weights and the value clip range; a fresh second critic (twin=True) cures a dead one.",
    ),
    Alert(
        "warn/critic1_vanishing_gradients",
        metrics.CRITIC1_GRAD_NORM,
        below(1e-8),
        "Critic 1 receives no gradient: it no longer learns.",
        "Check the value clip range and that returns vary; look for a detached or frozen critic.",
    ),
    Alert(
        "warn/critic2_vanishing_gradients",
        metrics.CRITIC2_GRAD_NORM,
        below(1e-8),
        "Critic 2 receives no gradient: it no longer learns.",
        "Check the value clip range and that returns vary; look for a detached or frozen critic.",
    ),
    Alert(
        "warn/first_log_ratio",
        metrics.FIRST_LOG_RATIO,
        above(1e-3),
        "Before the first step the policy already disagrees with the actions it took: it trains on other inputs or "
        "states than it acted on.",
        "Look for an observation wrapper that changes between acting and training, or dropout in the policy.",
    ),
    Alert(
        "warn/ev_reserve_all_masked",
        metrics.RESERVE_ALL_MASKED,
        above(0.0),
        "The sequences set aside for explained variance held no valid sample, so it was not measured.",
        "Raise ev_reserve or n_steps, or mask fewer samples.",
    ),
    Alert(
        "warn/empty_epoch",
        metrics.EMPTY_EPOCHS,
        above(0.0),
        "An epoch held no valid sample: no step was taken.",
        "Check which samples the environment marks as invalid.",
    ),
    Alert(
        "warn/nonfinite_steps",
        metrics.SKIPPED_STEPS,
        above(0.0),
        "Loss or gradient was not finite; those steps were skipped and the weights left alone.",
        "Lower the learning rate or max_grad_norm; look for rewards or observations of extreme size.",
    ),
    Alert(
        "warn/cvar_tail_samples_low",
        metrics.TAIL_SAMPLES,
        below(10.0),
        "Fewer than ten risk periods are in the tail, so the CVaR that steers the policy is a guess.",
        "Raise risk.window, n_steps or the number of environments, shorten the risk period, or raise risk.alpha.",
        for_updates=10,
    ),
    Alert(
        "warn/quantiles_miscalibrated",
        metrics.COVERAGE_ERROR,
        above(0.2),
        "Realised returns have not followed the predicted quantiles for many updates: predicted tails cannot be "
        "trusted.",
        "Give the critics more weight or steps (vf_coef, learning_rate, n_epochs), lower critic.huber_kappa, or wait "
        "until the policy settles.",
        for_updates=20,
    ),
    Alert(
        "warn/lstm_explosion",
        Metric("lstm/cell_max_abs", "Largest |cell| of any trunk at the end of the rollout."),
        above(1e3),
        "A recurrent cell has grown without bound.",
        "Lower the learning rate, shorten episodes, or normalize the observations.",
    ),
    Alert(
        "warn/lstm_saturation",
        Metric("lstm/saturated_share", "Share of hidden units with |h| > 0.99 at the end of the rollout."),
        above(0.9),
        "Nearly all recurrent units are saturated: they pass on no gradient.",
        "Normalize the observations or lower the learning rate.",
    ),
)


class AlertMonitor:
    """Which alerts hold, since when; writes `warn/...` metrics and one console line when an alert begins."""

    def __init__(self, alerts: tuple[Alert, ...] = ALERTS) -> None:
        self.alerts = alerts
        self.streaks: dict[str, int] = {}

    def check(self, values: Mapping[str, float], logger: Logger) -> list[Alert]:
        """Judge one update's figures; returns the alerts that fire."""
        firing = []
        for alert in self.alerts:
            value = values.get(alert.metric.name)
            holds = value is not None and alert.fires(value)
            streak = self.streaks.get(alert.name, 0) + 1 if holds else 0
            self.streaks[alert.name] = streak
            if streak >= alert.for_updates:
                firing.append(alert)
                logger.record(alert.name, 1.0)
            if streak == alert.for_updates:
                logger.warn(f"{alert.name}: {alert.metric.name} = {value:.3g}. {alert.meaning} {alert.advice}")
        return firing

    def begun(self) -> list[Alert]:
        """Alerts that began to fire at the last check."""
        return [alert for alert in self.alerts if self.streaks.get(alert.name, 0) == alert.for_updates]

    def state_dict(self) -> dict[str, Any]:
        return {"streaks": dict(self.streaks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.streaks = {name: int(count) for name, count in state["streaks"].items()}
