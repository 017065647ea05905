"""The base of every configuration: frozen, checked, unknown keys refused with a did-you-mean."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tailguard.errors import ConfigError, InertSetting, InertSettingError, did_you_mean

Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
UnitInterval = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(ge=1, le=10**12)]
NonNegativeInt = Annotated[int, Field(ge=0, le=10**12)]
"""Counts of what passes one after another, such as steps. More than a million a second for ten days is a slip."""
Several = Annotated[int, Field(ge=1, le=10_000)]
"""Counts of what is held or planned at once, such as members, folds or passes."""
Threads = Annotated[int, Field(ge=1, le=1024)]
"""Threads or processes of one machine: libraries end the process, without a message, where these are too many."""
Environments = Annotated[int, Field(ge=1, le=2**16)]
"""Environments that are built, one by one, and stepped together."""
Seed = Annotated[int, Field(ge=0, lt=2**32)]
"""What numpy's global generator, which environments may use, can be seeded with."""
Width = Annotated[int, Field(ge=1, le=2**16)]
"""Units of a layer, quantiles, atoms: a matrix of twice the largest is more than memory holds."""


class Config(BaseModel):
    """Pydantic, frozen, strict about names: a key that nothing reads is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False)

    removed: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    """Settings of earlier versions: the value that was the default, and what became of the setting."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            inert = inert_settings(error)
            if inert is not None:
                raise InertSettingError(inert) from None
            raise ConfigError(describe(error, type(self))) from None

    def inert(self) -> Iterable[InertSetting]:
        """Settings that differ from their defaults and do nothing beside the others, such as those of another mode.

        A switch (a mode, a bool, None, a count of 0 that means "off") makes settings inert, a number that happens to be
        small does not: a coefficient may pass through zero.
        """
        return ()

    def unread(self, names: Iterable[str], why: str) -> list[InertSetting]:
        """Those of the named settings that are not at their defaults. why: follows "does nothing:"."""
        found = []
        for name in names:
            value, default = getattr(self, name), type(self).model_fields[name].get_default(call_default_factory=True)
            if value != default:
                advice = f"does nothing: {why}, or leave {name} at {default!r}."
                found.append(InertSetting(name, value, advice, default))
        return found

    @model_validator(mode="before")
    @classmethod
    def removed_settings_give_way(cls, values: Any) -> Any:
        """Settings of earlier versions are left out, with a line where they were not at their default."""
        if not isinstance(values, Mapping):
            return values
        for name in cls.removed.keys() & values.keys():
            default, outcome = cls.removed[name]
            if values[name] != default:
                warnings.warn(f"{name}={values[name]!r} is a setting of earlier versions: {outcome}", stacklevel=2)
        return {name: value for name, value in values.items() if name not in cls.removed}

    @model_validator(mode="after")
    def every_setting_acts(self) -> Self:
        found = list(self.inert())
        if found:
            raise InertSettingError(found)
        return self

    def replace(self, **changes: Any) -> Self:
        """A checked copy with some fields changed."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})


C = TypeVar("C", bound=Config)


def saved_config(kind: type[C], values: Mapping[str, Any], where: Any) -> C:
    """A configuration that an earlier version wrote: it accepted settings that do nothing; they give way with a line.

    where: what is being read, for that line
    """
    while True:
        try:
            return kind(**values)
        except InertSettingError as error:
            for setting in error.settings:
                values = with_value(values, setting.path.split("."), setting.instead)
            warn_of_inert(error.settings, where)


def warn_of_inert(settings: Iterable[InertSetting], where: Any) -> None:
    """One line for each setting of something saved that gave way."""
    for setting in settings:
        warnings.warn(f"{where}: {setting} It is taken as {setting.instead!r}.", stacklevel=3)


def with_value(tree: Any, path: list[str], value: Any) -> Any:
    """A copy of nested settings, mappings or sequences or configurations, with the one at `path` changed."""
    if not path:
        return value
    name, *rest = path
    if isinstance(tree, Config):
        return tree.replace(**{name: with_value(getattr(tree, name), rest, value)})
    if isinstance(tree, list | tuple):
        return [with_value(part, rest, value) if i == int(name) else part for i, part in enumerate(tree)]
    return {**tree, name: with_value(tree.get(name, {}), rest, value)}


def inert_settings(error: ValidationError) -> list[InertSetting] | None:
    """All that is wrong, with whole paths, when it is inert settings and nothing else."""
    found: list[InertSetting] = []
    for problem in error.errors():
        cause = problem.get("ctx", {}).get("error")
        if not isinstance(cause, InertSettingError):
            return None
        prefix = ".".join(str(part) for part in problem["loc"])
        found += [setting.below(prefix) for setting in cause.settings]
    return found


EXPECTED = {
    "tuple_type": "expected a list, such as [first, second]",
    "list_type": "expected a list, such as [first, second]",
    "model_type": "expected settings of its own below it, not a single value",
    "model_attributes_type": "expected settings of its own below it, not a single value",
    "dict_type": "expected settings of its own below it, not a single value",
}
"""What pydantic calls by the names of Python's types, in the words of a configuration file."""


def describe(error: ValidationError, config: type[BaseModel]) -> str:
    """One line per problem: the key, the value found, what is wrong with it, what may have been meant."""
    lines = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"]) or config.__name__
        if problem["type"] == "extra_forbidden":
            name = str(problem["loc"][-1])
            known = fields_at(config, problem["loc"][:-1])
            below = [path for path in paths_to(config, name) if path != where]
            meant = f" Did you mean {' or '.join(map(repr, below))}?" if below else did_you_mean(name, known)
            lines.append(f"{config.__name__} has no setting {where!r}.{meant} Known: {', '.join(known)}.")
        elif "error" in problem.get("ctx", {}):
            lines.append(str(problem["ctx"]["error"]))
        elif problem["type"] == "missing":
            lines.append(f"{config.__name__} needs {where!r}, which is not given.")
        else:
            said = EXPECTED.get(problem["type"], problem["msg"])
            lines.append(f"{config.__name__}.{where}={problem['input']!r}: {said}.")
    return "\n".join(lines)


def fields_at(config: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """Names of the settings of the (possibly nested) configuration at `path`."""
    for part in path:
        field = config.model_fields.get(str(part))
        config = (nested_in(field.annotation) if field is not None else None) or config
    return list(config.model_fields)


def paths_to(config: type[BaseModel], name: str, prefix: str = "") -> list[str]:
    """Where a setting of this name stands, as it is written: gamma is at ppo.gamma."""
    found = [f"{prefix}{name}"] if name in config.model_fields else []
    for field, info in config.model_fields.items():
        if (below := nested_in(info.annotation)) is not None:
            found += paths_to(below, name, f"{prefix}{field}.")
    return found


def nested_in(annotation: Any) -> type[BaseModel] | None:
    """The configuration that a field holds, also where it may be None."""
    options = [annotation, *get_args(annotation)]
    return next((kind for kind in options if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
