"""Risk on the policy: the tail of a period's return enters the advantage, never the critics (docs/risk.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, exp
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import nn

from tailguard.configuration import Config, Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, UnitInterval, Width
from tailguard.errors import ConfigError, InertSetting
from tailguard.health import metrics
from tailguard.health.metrics import Metric
from tailguard.losses.risk import cell_masses, cvar_weights, empirical_cvar, interpolation_weights
from tailguard.normalization import Affine, ReturnScale, ReturnScaleConfig
from tailguard.policy import CriticConfig, RecurrentPolicy
from tailguard.rollout import RolloutBuffer
from tailguard.rollout.advantages import advantages, through_invalid
from tailguard.rollout.collect import RolloutState
from tailguard.rollout.periods import Periods, risk_rewards, walk_periods
from tailguard.rollout.targets import rewards_to_go
from tailguard.schedules import Schedule
from tailguard.stateful import require_keys

Floats = NDArray[np.floating[Any]]

DUAL_MIN = 1e-3
"""The dual variable moves by factors, so it must not reach zero; at this price risk does not matter."""

OF_PERIODS = ("horizon", "window", "gae_lambda", "units")
OF_A_LIMIT = ("dual_init", "dual_max", "dual_learning_rate", "dual_delay")

FRESH_MAX = 0.3
"""Share of a window that counts as fresh at most: one update does not let the policy follow any faster."""

VALUE_LAMBDA = 0.97
"""Decay of what the risk value learns from, at least: it must see as far as a period reaches. With the short traces of
advantages, what happens at a period's end would come back a step or two per update, and never arrive."""


class RiskConfig(Config):
    """How the tail of the return enters the policy's objective."""

    mode: Literal["none", "episode", "nested"] = "none"
    """`episode`: CVaR of a risk period's return, judged at its start. `nested`: CVaR of what is still to come, judged
    afresh at every step by the critic's quantiles."""
    alpha: Fraction = 0.05
    """Tail share; 0.05 reads "the mean of the worst 5 % of outcomes", 1 is the mean. Metrics use it too."""
    weight: UnitInterval | None = None
    """w of the objective (1 - w) * mean + w * CVaR; 1 is pure CVaR."""
    cvar_limit: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Maximise the mean subject to CVaR >= this, in units of a risk period's return."""
    horizon: PositiveInt | None = None
    """Steps of a risk period; None: the episode."""
    window: PositiveInt | None = None
    """Recent periods from which threshold and CVaR are estimated; None: enough for 25 of them in the tail."""
    gae_lambda: UnitInterval = 0.5
    """Decay of the risk stream's advantage trace. Its value knows X and time, so it can be trusted early; a long trace
    collects the noise of every step up to the period's end."""
    units: Width = 48
    """Of each of the two layers of the stream's value. Their products are most of what risk costs in time."""
    dual_init: PositiveFloat = 1.0
    """Dual variable, the price of the limit, at the start."""
    dual_max: Annotated[float, Field(ge=DUAL_MIN, allow_inf_nan=False)] = 100.0
    """Its cap."""
    dual_learning_rate: NonNegativeFloat | Schedule = Schedule(start=1.0, end=0.0)
    """How fast its logarithm follows the violation, per window of fresh periods."""
    dual_delay: UnitInterval = 0.1
    """Share of training during which it stands still, for the policy to settle at the price it starts with."""

    @model_validator(mode="after")
    def one_objective(self) -> RiskConfig:
        given = {name for name in ("weight", "cvar_limit") if getattr(self, name) is not None}
        if self.mode == "none" and given:
            raise ConfigError(
                f'risk: {" and ".join(sorted(given))} given, but mode="none" reads neither. '
                'Use mode="episode" for the risk of a whole period, or mode="nested" for that of every step.'
            )
        if self.mode != "none" and len(given) != 1:
            raise ConfigError(
                f'risk: mode="{self.mode}" needs either weight or cvar_limit, not {"both" if given else "neither"}. '
                "weight=1 is pure CVaR; cvar_limit=-0.04 keeps CVaR of a period's return at -0.04 or better."
            )
        if self.mode == "nested" and self.cvar_limit is not None:
            raise ConfigError(
                'risk: a cvar_limit is a promise about a period, which mode="nested" does not look at. '
                'Use mode="episode", or weight.'
            )
        return self

    def inert(self) -> Iterable[InertSetting]:
        if self.mode == "none":
            why = 'mode="none" leaves risk out of the objective; use mode="episode" or "nested"'
            yield from self.unread(("alpha", *OF_PERIODS, *OF_A_LIMIT), why)
        elif self.mode == "nested":
            yield from self.unread((*OF_PERIODS, *OF_A_LIMIT), 'mode="nested" has no periods; use mode="episode"')
        elif self.cvar_limit is None:
            yield from self.unread(OF_A_LIMIT, "a weight has no dual variable; give cvar_limit instead of weight")
        elif not DUAL_MIN <= self.dual_init <= self.dual_max:
            why = f"is outside [{DUAL_MIN:g}, {self.dual_max:g}], where the dual variable moves: move it or dual_max."
            nearest = min(max(self.dual_init, DUAL_MIN), self.dual_max)
            yield InertSetting("dual_init", self.dual_init, why, nearest, conditional=False)

    @property
    def value_units(self) -> int:
        """Of the risk stream's value; 0: the policy carries none."""
        return self.units if self.mode == "episode" else 0

    @property
    def n_recent(self) -> int:
        """Periods that are remembered."""
        return self.window or max(ceil(25 / self.alpha), 200)


class Risk:
    """No risk term: the policy's advantage is that of the return, and nothing is remembered."""

    def __init__(self, config: RiskConfig) -> None:
        self.config = config

    def judge(self, policy: RecurrentPolicy, buffer: RolloutBuffer, state: RolloutState) -> None:
        """After the critics: what the rollout says about risk."""

    def follow_scale(self, policy: RecurrentPolicy, buffer: RolloutBuffer) -> list[tuple[nn.Linear, float, float]]:
        """Move the risk value's unit; which layers moved, for the optimizer to follow."""
        return []

    def advantages(self, buffer: RolloutBuffer, target: Floats) -> Floats:
        """(T, N) what the policy is to climb. target: (T, N, K) samples of the return from each step on."""
        return buffer.advantages

    def value_targets(self, buffer: RolloutBuffer) -> Floats | None:
        """(T, N, 3) what the risk value learns from; None: nothing does."""
        return None

    def update(self, progress: float) -> Mapping[Metric, float]:
        """Move the dual variable after an update; returns what is worth logging."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_keys(self, state)


class NestedRisk(Risk):
    """CVaR of the return from every step on, with the critic's quantiles as the law (docs/risk.md, eq. R4)."""

    def __init__(self, config: RiskConfig, critic: CriticConfig) -> None:
        super().__init__(config)
        self.levels = critic.levels

    def advantages(self, buffer: RolloutBuffer, target: Floats) -> Floats:
        return nested_advantages(
            target, buffer.law[:-1], self.levels, self.config.alpha, float(self.config.weight or 0.0)
        )


class EpisodeRisk(Risk):
    """CVaR of a period's return by Rockafellar and Uryasev: a second reward stream with a value of its own."""

    def __init__(self, config: RiskConfig, horizon: int | None = None) -> None:
        """`horizon`: updates after which the scale of the risk value forgets; None: never."""
        super().__init__(config)
        self.recent = np.zeros((0, 2))  # return and length of the last periods
        self.dual = config.dual_init
        self.fresh = 0.0  # share of the remembered periods that the last rollout brought
        self.scale = ReturnScale(ReturnScaleConfig(horizon=horizon))

    @property
    def threshold(self) -> float:
        """nu: the alpha-quantile of recent period returns; under a limit, held near where the limit binds.

        A policy learns to stop just above nu, so a quantile that follows the policy and a policy that follows the
        quantile can drift anywhere together. Room under the limit lowers nu by as much, and nu is never below the
        limit, because VaR is never below CVaR: neither changes anything once the limit binds.
        """
        returns, config = self.recent[:, 0], self.config
        quantile = float(np.quantile(returns, config.alpha, method="inverted_cdf"))
        if config.cvar_limit is None:
            return quantile
        room = max(empirical_cvar(returns, config.alpha) - config.cvar_limit, 0.0)
        return max(quantile - room, config.cvar_limit)

    def remember(self, periods: Periods) -> None:
        """Keep the last periods; never fewer than the newest rollout's."""
        fresh = np.stack([periods.returns, periods.lengths], -1)
        keep = max(self.config.n_recent, len(fresh))
        self.recent = np.concatenate([self.recent, fresh])[-keep:]
        self.fresh = len(fresh) / keep

    def judge(self, policy: RecurrentPolicy, buffer: RolloutBuffer, state: RolloutState) -> None:
        """Risk stream, its values and its advantages, in raw reward units and without discount."""
        periods = walk_periods(
            buffer.rewards,
            buffer.terminated,
            buffer.truncated,
            state.period_return,
            state.period_steps,
            self.config.horizon,
        )
        state.period_return, state.period_steps = periods.so_far[-1], periods.elapsed[-1]
        self.remember(periods)
        if not len(self.recent):  # no period is over yet: there is no tail to speak of
            buffer.risk_advantages, buffer.risk_returns = np.zeros_like(buffer.rewards), np.zeros_like(buffer.rewards)
            buffer.period = np.zeros((*buffer.rewards.shape, 2))
            return
        stream = risk_rewards(buffer.rewards, periods.so_far[:-1], self.threshold, self.config.alpha)
        over = periods.ended | periods.cut
        self.scale.calibrate(rewards_to_go(stream, over, 1.0)[buffer.valid])
        period = self.period_features(periods.so_far, periods.elapsed)
        values = self.values(policy, buffer, period)
        successors = np.where(periods.ended, 0.0, values[1:])
        if periods.cut.any():
            successors[periods.cut] = self.values_at_cuts(policy, buffer, periods)
        buffer.period = period[:-1]
        lam, value_lam = (
            through_invalid(decay, buffer.valid)
            for decay in (self.config.gae_lambda, max(self.config.gae_lambda, VALUE_LAMBDA))
        )
        buffer.risk_advantages = advantages(stream, values, successors, over, 1.0, lam)
        learned = advantages(stream, values, successors, over, 1.0, value_lam)
        buffer.risk_returns = learned + values[:-1]

    def period_features(self, so_far: Floats, elapsed: Floats) -> Floats:
        """(..., 2) distance of X from the threshold in spreads of X, and the share of a period that is over."""
        spread = max(float(self.recent[:, 0].std()), 1e-12)
        length = self.config.horizon or float(self.recent[:, 1].mean())
        distance = np.clip((so_far - self.threshold) / spread, -10.0, 10.0)
        return np.stack([distance, elapsed / length], -1)

    def values(self, policy: RecurrentPolicy, buffer: RolloutBuffer, period: Floats) -> Floats:
        """(T + 1, N) risk values, raw units."""
        obs = np.concatenate([buffer.observations, buffer.last_observations[None]])
        return self.decoded(policy, buffer.features, obs, period)

    def values_at_cuts(self, policy: RecurrentPolicy, buffer: RolloutBuffer, periods: Periods) -> Floats:
        """(C,) after the last step of episodes that were truncated inside a period."""
        after = periods.so_far[:-1] + buffer.rewards, periods.elapsed[:-1] + 1.0
        period = self.period_features(*(part[periods.cut] for part in after))
        among_ends = periods.cut[buffer.truncated]  # truncations that completed no period
        obs = np.stack([buffer.terminal_observations[int(t), int(n)] for t, n in np.argwhere(periods.cut)])
        return self.decoded(policy, buffer.terminal_features[torch.from_numpy(among_ends)], obs, period)

    def decoded(self, policy: RecurrentPolicy, features: torch.Tensor, obs: Floats, period: Floats) -> Floats:
        assert policy.risk_value is not None  # noqa: S101 (built together with this part)
        inputs = (features, torch.from_numpy(obs), torch.from_numpy(period.astype(np.float32)))
        with torch.no_grad():
            value = policy.risk_value(*(part.to(policy.device) for part in inputs)).numpy(force=True)
        scale = self.scale.snapshot
        raw: Floats = scale.mean + scale.std * value.astype(np.float64)
        return raw

    def follow_scale(self, policy: RecurrentPolicy, buffer: RolloutBuffer) -> list[tuple[nn.Linear, float, float]]:
        if not len(self.recent) or policy.risk_value is None:
            return []
        before, after = self.scale.update(buffer.risk_returns[buffer.valid])
        return [policy.risk_value.rescale(before, after)] if before != after else []

    def advantages(self, buffer: RolloutBuffer, target: Floats) -> Floats:
        weight = self.dual / (1.0 + self.dual) if self.config.weight is None else self.config.weight
        mixed: Floats = (1.0 - weight) * buffer.advantages + weight * buffer.risk_advantages
        return mixed

    def value_targets(self, buffer: RolloutBuffer) -> Floats | None:
        scale: Affine = self.scale.snapshot
        target = (buffer.risk_returns - scale.mean) / scale.std
        return np.concatenate([buffer.period, target[..., None]], -1)

    def update(self, progress: float) -> Mapping[Metric, float]:
        """The dual variable climbs while the limit is violated and falls while there is room."""
        returns, config = self.recent[:, 0], self.config
        figures = {metrics.TAIL_SAMPLES: config.alpha * len(returns)}
        if not len(returns):
            return figures
        tail, mean = empirical_cvar(returns, config.alpha), float(returns.mean())
        figures |= {metrics.PERIOD_MEAN: mean, metrics.PERIOD_CVAR: tail, metrics.THRESHOLD: self.threshold}
        if config.cvar_limit is not None:
            depth = max(mean - tail, 1e-12)  # the tail's own size makes the step free of units
            gap = float(np.clip((config.cvar_limit - tail) / depth, -1.0, 1.0))
            rate = config.dual_learning_rate
            step = (rate.at(progress) if isinstance(rate, Schedule) else rate) * min(self.fresh, FRESH_MAX) * gap
            step = step if progress >= config.dual_delay else 0.0
            figures |= {metrics.DUAL: self.dual, metrics.VIOLATION: max(config.cvar_limit - tail, 0.0)}
            self.dual = min(max(self.dual * exp(step), DUAL_MIN), config.dual_max)
        return figures

    def state_dict(self) -> dict[str, Any]:
        return {"recent": self.recent.copy(), "dual": self.dual, "fresh": self.fresh, "scale": self.scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_keys(self, state)
        self.recent, self.dual = np.array(state["recent"], dtype=np.float64).reshape(-1, 2), float(state["dual"])
        self.fresh = float(state["fresh"])
        self.scale.load_state_dict(state["scale"])


def nested_advantages(target: Floats, law: Floats, levels: tuple[float, ...], alpha: float, weight: float) -> Floats:
    """How much better than expected each step's return is, in the eyes of (1 - w) * mean + w * CVaR of the law there.

    target: (T, N, K) samples of the return after the action taken;  law: (T, N, Q) predicted before it
    returns: (T, N)

    A sample Z counts as (1 - w) Z + w (nu - (nu - Z)+ / alpha) with nu the law's alpha-quantile: its mean under the law
    is the law's distorted value, so the advantage is zero on average where the critic is calibrated.
    """
    ordered = np.sort(law, -1)
    masses = cell_masses(levels)
    if alpha == 1.0:
        plain: Floats = target.mean(-1) - ordered @ masses
        return plain
    threshold = (ordered @ interpolation_weights(levels, np.array([alpha])))[..., :1]
    counted = (1.0 - weight) * target + weight * (threshold - np.maximum(threshold - target, 0.0) / alpha)
    tail = np.asarray(cvar_weights(levels, alpha, "normal"))
    value = ordered @ ((1.0 - weight) * masses + weight * tail)
    result: Floats = counted.mean(-1) - value
    return result


def make_risk(config: RiskConfig, critic: CriticConfig, horizon: int | None = None) -> Risk:
    """The part a config asks for; `horizon` is that of the return scale."""
    if config.mode == "episode":
        return EpisodeRisk(config, horizon)
    return NestedRisk(config, critic) if config.mode == "nested" else Risk(config)
