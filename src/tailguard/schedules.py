"""Values that change over training: how a number falls with progress, and when entropy may start to fall."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import cos, pi
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from stable_baselines3.common.utils import ConstantSchedule, FloatSchedule, LinearSchedule

from tailguard.configuration import Config, NonNegativeFloat, NonNegativeInt, PositiveFloat
from tailguard.errors import ConfigError, InertSetting
from tailguard.stateful import require_keys

LARGEST = 1e30
"""Of a scheduled number: a step of this size is still one that float32 can hold."""
Bounded = Annotated[float, Field(ge=0.0, le=LARGEST)]


class Schedule(Config):
    """A number that moves from `start` to `end` while progress goes from 0 to 1."""

    shape: Literal["linear", "cosine"] = "linear"
    """How the value moves between its ends."""
    start: Bounded
    """Value at the first update."""
    end: Bounded = 0.0
    """Value at the last update."""

    def at(self, progress: float) -> float:
        """Value after a share `progress` of training, from 0 to 1."""
        share = min(max(progress, 0.0), 1.0)
        if self.shape == "cosine":
            share = 0.5 * (1.0 - cos(pi * share))
        return self.start + (self.end - self.start) * share

    def __call__(self, remaining: float) -> float:
        """Value where `remaining` (1 to 0) of training is still to come: a schedule of SB3's kind."""
        return self.at(1.0 - remaining)


def plain_schedule(value: Any) -> Any:
    """A schedule object of SB3 as the number or `Schedule` that it stands for, which can be saved; else the value."""
    if isinstance(value, FloatSchedule):
        return plain_schedule(value.value_schedule)
    if isinstance(value, ConstantSchedule):
        return float(value.val)
    if isinstance(value, LinearSchedule) and value.end_fraction == 1.0:
        return Schedule(start=float(value.start), end=float(value.end))
    return value.item() if isinstance(value, np.generic) else value


Scheduled = Bounded | Schedule | Callable[[float], float]
"""A constant, a declared schedule, or a function of SB3's kind: progress remaining (1 to 0) -> value."""


def value_at(scheduled: Scheduled, progress: float) -> float:
    """Value of anything that may be scheduled after a share `progress` of training."""
    if isinstance(scheduled, Schedule):
        return scheduled.at(progress)
    if callable(scheduled):
        value = float(scheduled(max(1.0 - progress, 0.0)))  # the last rollout may go beyond the steps asked for
        if not 0.0 <= value <= LARGEST:
            raise ConfigError(
                f"The schedule's function returned {value} at {1.0 - progress:.3f} of progress remaining; it must be a "
                f"number from 0 to {LARGEST:g}."
            )
        return value
    return float(scheduled)


class EntropyConfig(Config):
    """How the entropy bonus falls over training (docs/algorithm.md, eq. 12)."""

    ent_coef_min: NonNegativeFloat = 0.0
    """Floor of the coefficient; it holds after decay and after a boost."""
    decay_updates: NonNegativeInt = 0
    """Updates over which the coefficient falls linearly to its floor; 0 keeps it constant."""
    plateau_window: NonNegativeInt = 0
    """Updates over which entropy is watched for a plateau, which delays the start of decay; 0 never delays. Until so
    many updates have been seen, nobody knows, and decay waits."""
    plateau_tolerance: PositiveFloat = 0.01
    """Entropy that moves less than this over the window is on a plateau."""
    boost: Annotated[float, Field(ge=1.0)] = 1.0
    """Factor on the coefficient while explained variance is bad; 1 switches it off."""
    boost_below: float = 0.0
    """Explained variance under which the boost acts."""
    boost_cap: PositiveFloat = 0.1
    """The coefficient is never boosted above this."""

    def inert(self) -> Iterable[InertSetting]:
        if self.decay_updates == 0:
            why = "decay_updates=0 keeps the coefficient constant; set decay_updates"
            yield from self.unread(("ent_coef_min", "plateau_window"), why)
        if self.plateau_window == 0 or self.decay_updates == 0:
            yield from self.unread(("plateau_tolerance",), "no decay waits for a plateau; set plateau_window")
        if self.boost == 1.0:
            yield from self.unread(("boost_below", "boost_cap"), "boost=1 switches the boost off; set boost above 1")


class EntropyCoefficient:
    """Linear decay to a floor that a plateau of policy entropy can only delay, never start or speed up."""

    def __init__(self, initial: float, config: EntropyConfig) -> None:
        self.initial, self.config = initial, config
        self.decay_done = 0  # updates of decay taken so far
        self.recent: deque[float] = deque(maxlen=config.plateau_window + 1)  # the ends of so many updates
        self.explained_variance: float | None = None

    @property
    def value(self) -> float:
        """Coefficient for the next update: decay, floor, boost, cap, floor again."""
        floor = self.config.ent_coef_min
        decayed = max(self.initial - (self.initial - floor) * self.decay_share, floor)
        bad = self.explained_variance is not None and self.explained_variance < self.config.boost_below
        if self.config.boost > 1.0 and bad:
            decayed = max(decayed, min(decayed * self.config.boost, self.config.boost_cap))
        return max(decayed, floor)

    @property
    def decay_share(self) -> float:
        """Share of the decay already done."""
        return min(self.decay_done / self.config.decay_updates, 1.0) if self.config.decay_updates else 0.0

    def update(self, policy_entropy: float, explained_variance: float | None) -> None:
        """Take in what one update measured and move on by at most one step of decay."""
        self.recent.append(policy_entropy)
        self.explained_variance = explained_variance
        if self.config.decay_updates == 0:
            return
        if self.decay_done == 0 and self.on_plateau():
            return
        self.decay_done = min(self.decay_done + 1, self.config.decay_updates)

    def on_plateau(self) -> bool:
        """Whether entropy moved less than the tolerance over the window, as far as is known."""
        window = self.config.plateau_window
        moved = max(self.recent) - min(self.recent)
        return window > 0 and (len(self.recent) <= window or moved < self.config.plateau_tolerance)

    def state_dict(self) -> dict[str, Any]:
        return {
            "decay_done": self.decay_done,
            "recent": list(self.recent),
            "explained_variance": self.explained_variance,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_keys(self, state)
        self.decay_done = int(state["decay_done"])
        self.recent = deque(state["recent"], maxlen=self.recent.maxlen)
        self.explained_variance = state["explained_variance"]


class KLPenaltyConfig(Config):
    """An adaptive penalty on the divergence from the policy that acted (docs/algorithm.md, eq. 11)."""

    target: PositiveFloat | None = None
    """Divergence aimed at per update; None switches the penalty off."""
    beta: PositiveFloat = 1.0
    """Weight of the penalty at the start."""
    tolerance: Annotated[float, Field(gt=1.0)] = 1.5
    """The weight moves when the divergence leaves [target / tolerance, target * tolerance]."""
    factor: Annotated[float, Field(gt=1.0)] = 2.0
    """Factor by which the weight moves."""
    beta_max: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 100.0
    """Cap on the weight; the floor is its inverse."""

    def inert(self) -> Iterable[InertSetting]:
        if self.target is None:
            yield from self.unread(("beta", "tolerance", "factor", "beta_max"), "there is no penalty; set a target")
        elif not 1.0 / self.beta_max <= self.beta <= self.beta_max:
            why = f"is outside [{1.0 / self.beta_max:g}, {self.beta_max:g}], where beta_max keeps it: move either."
            nearest = min(max(self.beta, 1.0 / self.beta_max), self.beta_max)
            yield InertSetting("beta", self.beta, why, nearest, conditional=False)


class KLPenalty:
    """The penalty's weight and its controller; weight 0 when switched off."""

    def __init__(self, config: KLPenaltyConfig) -> None:
        self.config = config
        self.beta = config.beta if config.target is not None else 0.0

    def update(self, kl: float) -> None:
        """Raise the weight when the policy moved too far, lower it when it moved too little."""
        target = self.config.target
        if target is None:
            return
        if kl > target * self.config.tolerance:
            self.beta = min(self.beta * self.config.factor, self.config.beta_max)
        elif kl < target / self.config.tolerance:
            self.beta = max(self.beta / self.config.factor, 1.0 / self.config.beta_max)

    def state_dict(self) -> dict[str, Any]:
        return {"beta": self.beta}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        require_keys(self, state)
        self.beta = float(state["beta"])
