"""Alerts declared as data: which figure, when it is wrong, for how long, what it means and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stable_baselines3.common.logger import Logger

from tailguard.errors import ConfigError
from tailguard.health import metrics
from tailguard.health.alert import Alert, above, below, outside, per_trunk
from tailguard.health.trends import Trends

__all__ = ["ALERTS", "Alert", "AlertMonitor", "above", "below", "outside"]


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
        "The sequences set aside for explained variance held fewer than two valid samples: it was not measured.",
        "Raise ev_reserve or n_steps, or mask fewer samples.",
    ),
    Alert(
        "warn/empty_epoch",
        metrics.EMPTY_EPOCHS,
        above(0.0),
        "An epoch held no valid sample: no step was taken.",
        'Check which steps the environment marks with info["valid"] = False; no_trade_windows of an account do.',
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
        "warn/cvar_limit_violated",
        metrics.VIOLATION,
        above(0.0),
        "The CVaR of recent risk periods has been below its limit for many updates.",
        "Give the dual variable time or reach (risk.dual_max, risk.dual_learning_rate); the limit may be out of reach.",
        for_updates=200,
    ),
    Alert(
        "warn/lstm_explosion",
        metrics.CELL_MAX,
        above(1e3),
        "A recurrent cell has grown without bound.",
        "Lower the learning rate, shorten episodes, or normalize the observations.",
    ),
    Alert(
        "warn/lstm_saturation",
        metrics.SATURATED_SHARE,
        above(0.9),
        "Nearly all recurrent units are saturated: they pass on no gradient.",
        "Normalize the observations or lower the learning rate.",
    ),
    Alert(
        "warn/lstm_death",
        metrics.DEAD_SHARE,
        above(0.9),
        "Nearly all recurrent units are silent: the memory holds nothing.",
        "Check that observations are not zero and that states are not reset at every step; normalize observations.",
        for_updates=3,
    ),
    Alert(
        "warn/explained_variance_low",
        metrics.EXPLAINED_VARIANCE,
        below(-0.5),
        "The critics predict worse than a constant would.",
        "Lower the learning rate or gamma, raise vf_coef, or look for rewards whose scale keeps changing.",
        for_updates=10,
    ),
    Alert(
        "warn/explained_variance_collapse",
        metrics.EXPLAINED_VARIANCE_DROP,
        above(0.5),
        "The critics once explained the returns and no longer do.",
        "Look for a change in the environment or an exploit at that time; lower the learning rate.",
        for_updates=5,
    ),
    Alert(
        "warn/entropy_collapse",
        metrics.ENTROPY_SHARE,
        below(1e-3),
        "A discrete policy has stopped trying anything else.",
        "Raise ent_coef or entropy.ent_coef_min, or lower the learning rate.",
        for_updates=10,
    ),
    Alert(
        "warn/exploration_collapse",
        metrics.STD,
        below(0.01),
        "A Gaussian policy's spread is below a hundredth of its range: it has stopped exploring.",
        "Raise ent_coef, or start with a larger log_std_init.",
        for_updates=10,
    ),
    Alert(
        "warn/kl_blow_up",
        metrics.KL,
        above(0.25),
        "The policy moves far from the one that acted, update after update.",
        "Lower the learning rate or n_epochs, or set target_kl.",
        for_updates=3,
    ),
    Alert(
        "warn/clip_fraction_high",
        metrics.CLIP_FRACTION,
        above(0.6),
        "Most samples are clipped: they no longer teach.",
        "Lower the learning rate or n_epochs.",
        for_updates=5,
    ),
    Alert(
        "warn/quantile_crossing",
        metrics.QUANTILE_CROSSING,
        above(0.25),
        "A quarter of neighbouring quantiles are in the wrong order, so the predicted law is not one.",
        "Give the critics more steps, lower their learning rate, or use fewer quantiles.",
        for_updates=20,
    ),
    Alert(
        "warn/normalizer_drift",
        metrics.MEAN_DRIFT,
        above(1.0),
        "The observations' mean keeps moving by more than a standard deviation per rollout.",
        "Look for a feature without a stable level (a price instead of a return, a counter).",
        for_updates=5,
    ),
    Alert(
        "warn/return_scale_jump",
        metrics.RETURN_SCALE_CHANGE,
        above(0.3),
        "The unit of the returns keeps jumping.",
        "Look for rewards of extreme size, or lower return_scale's cap on its change.",
        for_updates=5,
    ),
    Alert(
        "warn/return_scale_stale",
        metrics.RETURN_SCALE_RATIO,
        above(5.0),
        "The critics' unit remembers returns far larger than those of now, so their quantiles are coarse and pulled to "
        "the mean.",
        'Let the scale forget: return_scale={"horizon": 20}, in updates. Where the agent has stopped acting there is '
        "nothing to predict.",
        for_updates=20,
    ),
    Alert(
        "warn/learning_rate_floor",
        metrics.LEARNING_RATE,
        below(1e-9),
        "The learning rate is zero while training goes on.",
        "Look at the schedule's end and at total_timesteps.",
        for_updates=3,
    ),
    Alert(
        "warn/vgs_pinned",
        metrics.VGS_PINNED,
        above(0.5),
        "Gradient noise holds the step at its lower bound: nothing is learned.",
        "Lower vgs.alpha, raise the batch size, or switch scaling off.",
        for_updates=10,
    ),
    Alert(
        "warn/upgd_gate_off_one",
        metrics.MEAN_GATE,
        outside(0.6, 1.4),  # gate="minmax" keeps each gate within 0.54 and 1.46: wider bounds would never be left
        "The utility gate changes the average step, so the learning rate no longer means what it says.",
        "Leave weight decay to the optimizer (weight_decay) instead of the loss, raise beta_utility, or use the other "
        "gate.",
        for_updates=5,
    ),
    Alert(
        "warn/action_saturation",
        metrics.ACTION_SATURATION,
        above(0.99),
        "Nearly every action lies beyond its bounds: the policy is all or nothing, and its gradient is that of noise.",
        'Check the scale of the action space; try action_bounds="squash" or a smaller learning rate.',
        for_updates=20,
    ),
    Alert(
        "warn/buy_and_hold_collapse",
        metrics.ACTION_SPREAD,
        below(1e-3),
        "The environment receives the same action all the time, whatever the policy sees.",
        "If one position pays whatever happens, this is the optimum; otherwise look at the features and at costs.",
        for_updates=20,
    ),
    Alert(
        "warn/overtrading",
        metrics.COST_SHARE,
        above(0.9),
        "Costs eat nearly all of a real gross profit.",
        "Train longer, lower exploration (log_std_init), raise gamma so that holding pays, or use a no-trade band.",
        for_updates=20,
    ),
    *per_trunk(
        "warn/{trunk}_trunk_vanishing_gradients",
        metrics.TRUNK_GRAD_SHARE,
        below(1e-5),
        "A layer in the trunk of {of} receives no gradient, or next to none, while its head does: it no longer learns.",
        "Look for dead or saturated units (activation_fn, observations that are not normalized) or a detached layer; "
        "start afresh with a lower learning rate.",
        for_updates=5,
    ),
    *per_trunk(
        "warn/{trunk}_lstm_death",
        metrics.TRUNK_DEAD_SHARE,
        above(0.9),
        "Nearly all recurrent units of {of} are silent: its memory holds nothing.",
        "If those of other trunks are not, its gates have closed: start afresh with a lower learning rate. Otherwise "
        "check that observations are not zero.",
        for_updates=3,
    ),
    *per_trunk(
        "warn/{trunk}_lstm_saturation",
        metrics.TRUNK_SATURATED_SHARE,
        above(0.9),
        "Nearly all recurrent units of {of} are saturated: they pass on no gradient.",
        "Normalize the observations or lower the learning rate.",
        for_updates=3,
    ),
)


class AlertMonitor:
    """Which alerts hold, since when; writes `warn/...` metrics and one console line when an alert begins.

    Own alerts, on any logged figure, and own listeners are added before training:

        agent.alerts.add(Alert("warn/my_turnover", metrics.TURNOVER, above(0.5), "Trades too much.", "Raise costs."))
        agent.alerts.listeners.append(lambda alert, value: send_mail(alert.name))
    """

    def __init__(self, alerts: tuple[Alert, ...] = ALERTS) -> None:
        self.alerts = alerts
        self.streaks: dict[str, int] = {}
        self.updates = 0
        self.since: dict[str, int] = {}
        self.trends = Trends()
        self.listeners: list[Callable[[Alert, float], None]] = []

    def add(self, alert: Alert) -> None:
        """One more alert; a name is used once."""
        if any(known.name == alert.name for known in self.alerts):
            raise ConfigError(f"There is already an alert {alert.name!r}. Give yours another name.")
        if not alert.name.startswith("warn/"):
            raise ConfigError(f"An alert's name begins with warn/, so that readers find it; {alert.name!r} does not.")
        self.alerts = (*self.alerts, alert)

    def check(self, values: Mapping[str, float], logger: Logger) -> list[Alert]:
        """Judge one update's figures; returns the alerts that fire."""
        self.updates += 1
        trends = self.trends.follow(values)
        for name, figure in trends.items():
            logger.record(name, figure)
        values = {**values, **trends}
        firing = []
        for alert in self.alerts:
            value = values.get(alert.metric.name)
            holds = value is not None and alert.fires(value)
            streak = self.streaks.get(alert.name, 0) + 1 if holds else 0
            self.streaks[alert.name] = streak
            if streak >= alert.for_updates:
                firing.append(alert)
                logger.record(alert.name, 1.0)
            if value is not None and streak == alert.for_updates:
                self.begin(alert, value, logger)
        return firing

    def begin(self, alert: Alert, value: float, logger: Logger) -> None:
        """Say it once, and to whom it may concern."""
        self.since[alert.name] = self.updates - alert.for_updates + 1
        logger.warn(alert.sentence(value, f"update {self.since[alert.name]}"))
        for listener in self.listeners:
            listener(alert, value)

    def begun(self) -> list[Alert]:
        """Alerts that began to fire at the last check."""
        return [alert for alert in self.alerts if self.streaks.get(alert.name, 0) == alert.for_updates]

    def state_dict(self) -> dict[str, Any]:
        return {
            "streaks": dict(self.streaks),
            "since": dict(self.since),
            "updates": self.updates,
            "trends": self.trends.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.streaks = {name: int(count) for name, count in state["streaks"].items()}
        self.since = {name: int(update) for name, update in state["since"].items()}
        self.updates = int(state["updates"])
        self.trends.load_state_dict(state["trends"])
