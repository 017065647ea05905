"""The base of every configuration: frozen, checked, unknown keys refused with a did-you-mean."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tailguard.errors import ConfigError, did_you_mean

Fraction = Annotated[float, Field(gt=0.0, le=1.0)]
UnitInterval = Annotated[float, Field(ge=0.0, le=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
Width = Annotated[int, Field(ge=1, le=2**16)]
"""Units of a layer, quantiles, atoms: a matrix of twice the largest is more than memory holds."""


class Config(BaseModel):
    """Pydantic, frozen, strict about names: a key that nothing reads is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=False, use_attribute_docstrings=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(describe(error, type(self))) from None

    def replace(self, **changes: Any) -> Self:
        """A checked copy with some fields changed."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})


def describe(error: ValidationError, config: type[BaseModel]) -> str:
    """One line per problem: the key, the value found, what is wrong with it, what may have been meant."""
    lines = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"]) or config.__name__
        if problem["type"] == "extra_forbidden":
            name = str(problem["loc"][-1])
            known = fields_at(config, problem["loc"][:-1])
            lines.append(
                f"{config.__name__} has no setting {where!r}.{did_you_mean(name, known)} Known: {', '.join(known)}."
            )
        elif "error" in problem.get("ctx", {}):
            lines.append(str(problem["ctx"]["error"]))
        elif problem["type"] == "missing":
            lines.append(f"{config.__name__} needs {where!r}, which is not given.")
        else:
            lines.append(f"{config.__name__}.{where}={problem['input']!r}: {problem['msg']}.")
    return "\n".join(lines)


def fields_at(config: type[BaseModel], path: tuple[Any, ...]) -> list[str]:
    """Names of the settings of the (possibly nested) configuration at `path`."""
    for part in path:
        field = config.model_fields.get(str(part))
        annotation = field.annotation if field is not None else None
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            config = annotation
    return list(config.model_fields)
