"""The search space of a population: which settings may change, within which bounds, and how they are explored."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from math import exp, log
from typing import Any, Self, TypeVar

import numpy as np
from pydantic import Field, model_validator

from tailguard.configuration import Config, PositiveFloat, UnitInterval
from tailguard.errors import ConfigError, InertSetting, InertSettingError, did_you_mean
from tailguard.ppo.config import PPOConfig
from tailguard.ppo.learner import OPTIMIZERS

Value = bool | int | float | str
C = TypeVar("C", bound=Config)

FIXED: dict[str, str] = {
    "n_steps": "segments of different members would no longer be equally many environment steps",
    "torch_threads": "results would depend on it in the last bits",
    "update_threads": "it changes how fast a member is, not how it learns",
    "optimizer": "the state of one optimizer does not fit another",
    "critic.kind": "it changes the shape of the critics",
    "critic.twin": "it changes the number of critics",
    "critic.n_quantiles": "it changes the shape of the critics",
    "critic.n_atoms": "it changes the shape of the critics",
    "critic.grid": "a trained head would stand for other levels than it learned",
    "critic.tail_alpha": "a trained head would stand for other levels than it learned",
    "critic.support": "a trained head would stand for other returns than it learned",
    "return_scale.enabled": "a trained critic would be read in another unit than it learned",
    "risk.mode": "it decides which heads and which state there are",
    "risk.horizon": "periods of one length do not continue as periods of another",
    "risk.dual_init": "it is only where the dual variable starts, and a running agent never returns there",
    "kl_penalty.beta": "it is only where the controller starts, and a running agent never returns there",
    "vgs.statistic": "statistics of one kind do not continue as another",
}
"""Settings that belong to what an agent is, not to how it goes on learning."""


class PathError(ConfigError):
    """A path leads to no setting."""


class HyperparamConfig(Config):
    """One setting that members vary. Type and bounds come from here, never from the value it has at the moment."""

    name: str
    """Where the setting is in `PPOConfig`, such as `ent_coef`, `learning_rate.start` or `optimizer_kwargs.sigma`."""
    low: float | None = Field(None, allow_inf_nan=False)
    """Smallest value."""
    high: float | None = Field(None, allow_inf_nan=False)
    """Largest value."""
    values: tuple[Value, ...] | None = None
    """Instead of bounds: the values to choose from; a perturbation moves to a neighbour in this order."""
    log: bool = False
    """Drawn evenly in the logarithm, for settings that matter by their order of magnitude."""
    integer: bool = False
    """Whole numbers only."""
    perturb_factors: tuple[PositiveFloat, ...] = (0.8, 1.25)
    """A perturbation multiplies by one of these."""
    perturb_step: PositiveFloat | None = None
    """Instead of a factor: a perturbation adds or subtracts this."""
    resample_probability: UnitInterval = 0.25
    """How often a value is drawn anew instead of perturbed: multiplying alone never leaves zero."""

    def inert(self) -> Iterable[InertSetting]:
        if self.values is not None:
            why = "a perturbation moves to a neighbour among the values; give low and high instead of values"
            yield from self.unread(("log", "integer", "perturb_factors", "perturb_step"), why)
        elif self.perturb_step is not None:
            yield from self.unread(("perturb_factors",), "perturb_step is added instead; leave perturb_step out")

    @model_validator(mode="after")
    def there_is_a_range(self) -> Self:
        if self.values is not None:
            if len(set(self.values)) < 2 or self.low is not None or self.high is not None:
                raise ConfigError(f"{self.name}: give at least two different values and no bounds, or bounds alone.")
            return self
        if self.low is None or self.high is None or not self.low < self.high:
            raise ConfigError(
                f"{self.name}: low={self.low} and high={self.high} are no range. Give low < high, or values=[...]."
            )
        if self.log and self.low <= 0.0:
            raise ConfigError(f"{self.name}: low={self.low} has no logarithm. Use low > 0, or log=False.")
        if self.perturb_step is None and not self.perturb_factors:
            raise ConfigError(f"{self.name}: no perturb_factors and no perturb_step. Give one of them.")
        return self

    def sample(self, rng: np.random.Generator) -> Value:
        """A value drawn from the whole range."""
        if self.values is not None:
            return self.values[int(rng.integers(len(self.values)))]
        low, high = self.bounds
        if self.log:
            return self.fit(exp(rng.uniform(log(low), log(high))))
        return self.fit(int(rng.integers(int(low), int(high) + 1)) if self.integer else rng.uniform(low, high))

    def explore(self, value: Value, rng: np.random.Generator) -> Value:
        """A neighbour of `value`, or now and then a value from anywhere."""
        if rng.random() < self.resample_probability:
            return self.sample(rng)
        moved = [self.neighbour(value, move) for move in rng.permutation(len(self.moves))]
        return next((neighbour for neighbour in moved if neighbour != value), value)

    @property
    def moves(self) -> tuple[float, ...]:
        """What a perturbation chooses from: steps through the values, steps in units, or factors."""
        if self.values is not None:
            return (-1.0, 1.0)
        return self.perturb_factors if self.perturb_step is None else (-self.perturb_step, self.perturb_step)

    def neighbour(self, value: Value, move: int) -> Value:
        """Where one of the moves leads; at a bound it may lead nowhere, and another move is tried."""
        by = self.moves[move]
        if self.values is not None:
            here = self.values.index(value) if value in self.values else 0
            return self.values[min(max(here + int(by), 0), len(self.values) - 1)]
        number = float(value)
        if self.perturb_step is not None:
            return self.fit(number + by)
        if self.integer and by != 1.0 and round(number * by) == round(number) != 0:
            return self.fit(number + (1 if by > 1.0 else -1))  # a small whole number would never move
        return self.fit(number * by)

    @property
    def bounds(self) -> tuple[float, float]:
        """Low and high of a range that has been checked."""
        if self.low is None or self.high is None:
            raise ConfigError(f"{self.name} has values and no bounds.")
        return self.low, self.high

    def fit(self, number: float) -> int | float:
        """Within the bounds and of the declared type."""
        low, high = self.bounds
        clipped = min(max(number, low), high)
        return int(min(max(round(clipped), np.ceil(low)), np.floor(high))) if self.integer else float(clipped)

    def holds(self, value: Value) -> bool:
        """Whether a value belongs to the declared space."""
        if self.values is not None:
            return value in self.values
        low, high = self.bounds
        typed = isinstance(value, int) if self.integer else isinstance(value, float)
        return typed and not isinstance(value, bool) and low <= float(value) <= high


def sample_all(space: Iterable[HyperparamConfig], rng: np.random.Generator) -> dict[str, Value]:
    """One value per setting, from the whole space."""
    return {parameter.name: parameter.sample(rng) for parameter in space}


def explore_all(
    space: Iterable[HyperparamConfig], values: Mapping[str, Value], rng: np.random.Generator
) -> dict[str, Value]:
    """What a loser tries next: the winner's values, each moved."""
    return {parameter.name: parameter.explore(values[parameter.name], rng) for parameter in space}


def with_values(config: C, values: Mapping[str, Value]) -> C:
    """A checked copy of a configuration with the settings at some paths changed; an unknown path is an error.

    A value that others leave without effect, such as a share of perturbed sequences where the mode that was drawn
    perturbs none, waits: `check_space` has seen that some of the members read it.
    """
    try:
        return strictly_with_values(config, values)
    except InertSettingError as error:
        if not all(setting.conditional for setting in error.settings):
            raise
        return with_values(config, {**values, **{setting.path: setting.instead for setting in error.settings}})


def strictly_with_values(config: C, values: Mapping[str, Value]) -> C:
    """`with_values`, where a value without effect is an error too."""
    return _changed(config, {tuple(path.split(".")): value for path, value in values.items()}, "")


def _changed(config: C, values: Mapping[tuple[str, ...], Value], prefix: str) -> C:
    """One level of `with_values`: everything below one setting is changed together, then checked together."""
    inner: dict[str, dict[tuple[str, ...], Value]] = defaultdict(dict)
    changes: dict[str, Any] = {}
    for (name, *rest), value in values.items():
        if name not in type(config).model_fields:
            known = list(type(config).model_fields)
            begins_above = not prefix and name == "ppo" and rest
            inside = f" Paths begin below `ppo`: write {'.'.join(rest)}."
            hint = inside if begins_above else did_you_mean(name, known)
            raise PathError(f"There is no setting {prefix}{name!s}.{hint} Known: {', '.join(known)}.")
        if rest:
            inner[name][tuple(rest)] = value
        else:
            changes[name] = value
    for name, below in inner.items():
        current = getattr(config, name)
        if isinstance(current, Config):
            try:
                changes[name] = _changed(current, below, f"{prefix}{name}.")
            except InertSettingError as error:
                raise InertSettingError([setting.below(name) for setting in error.settings]) from None
        elif isinstance(current, Mapping):
            changes[name] = {**current, **{".".join(path): value for path, value in below.items()}}
        else:
            path = ".".join(next(iter(below)))
            raise PathError(
                f"{prefix}{name} is {current!r} here, so there is no {prefix}{name}.{path} to vary. "
                f"Give {prefix}{name} settings of its own in the configuration, or vary {prefix}{name} itself."
            )
    return config.replace(**changes)


def check_space(space: Sequence[HyperparamConfig], config: PPOConfig) -> None:
    """Refuse a space that this learner cannot follow, before anything is trained: paths, fixed settings, bounds."""
    names = [parameter.name for parameter in space]
    twice = {name for name in names if names.count(name) > 1}
    overlapping = {name for name in names for other in names if other.startswith(f"{name}.")}
    if twice or overlapping:
        raise ConfigError(f"The search space names {', '.join(sorted(twice | overlapping))} more than once.")
    for parameter in space:
        if parameter.name in FIXED:
            raise ConfigError(f"{parameter.name} cannot vary within a population: {FIXED[parameter.name]}.")
        for value in ends(parameter):
            check_values(config, {parameter.name: value})
        check_optimizer_option(parameter.name, config)
    for one, other in combinations(space, 2):  # two bounds that are fine by themselves may not go together
        for value, beside in product(ends(one), ends(other)):
            check_values(config, {one.name: value, other.name: beside})


def ends(parameter: HyperparamConfig) -> tuple[Value, ...]:
    """The outermost values a setting can take, or all of its choices."""
    return parameter.values or tuple(parameter.fit(bound) for bound in parameter.bounds)


def check_values(config: PPOConfig, values: Mapping[str, Value]) -> None:
    """Refuse bounds or choices that the learner would refuse in the middle of a training."""
    try:
        with_values(config, values)
    except PathError:
        raise
    except ConfigError as error:
        reached = " with ".join(f"{name}={value!r}" for name, value in values.items())
        raise ConfigError(f"The search space reaches {reached}, which cannot be: {error}") from None


def refuse_what_no_member_reads(space: Sequence[HyperparamConfig], config: PPOConfig) -> None:
    """A setting that varies must do something for some member: by itself, or beside a choice that is varied too."""
    choices = [{other.name: choice} for other in space if other.values is not None for choice in other.values]
    for parameter in space:
        beside: list[dict[str, Value]] = [{}, *(choice for choice in choices if parameter.name not in choice)]
        found = [inert_beside(config, parameter, choice) for choice in beside]
        if found[0] is not None and all(found):
            raise ConfigError(f"The population varies what no member reads: {found[0]}")


def inert_beside(config: PPOConfig, parameter: HyperparamConfig, values: Mapping[str, Value]) -> InertSetting | None:
    """What is said of a setting that does nothing beside these values; None where it does something."""
    for end in ends(parameter):
        try:
            strictly_with_values(config, {parameter.name: end, **values})
        except InertSettingError as error:
            for setting in error.settings:
                if setting.path == parameter.name:
                    return setting
    return None


def check_optimizer_option(path: str, config: PPOConfig) -> None:
    """An option of the optimizer must be one of its arguments; `optimizer_kwargs` alone cannot tell."""
    head, _, option = path.partition(".")
    if head != "optimizer_kwargs":
        return
    known = [name for name in inspect.signature(OPTIMIZERS[config.optimizer]).parameters if name != "params"]
    if option not in known:
        raise ConfigError(
            f"optimizer={config.optimizer!r} has no option {option!r}.{did_you_mean(option, known)} "
            f"Known: {', '.join(known)}."
        )
