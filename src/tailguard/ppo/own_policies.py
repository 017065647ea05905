"""What a bundle says of a policy beyond its weights: the class it is of, and which of its parameters are frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tailguard.errors import ConfigError, StateError
from tailguard.policy import RecurrentPolicy


def frozen_names(policy: RecurrentPolicy) -> list[str]:
    """Names of the parameters that do not learn."""
    return [name for name, parameter in policy.named_parameters() if not parameter.requires_grad]


def freeze_as_saved(policy: RecurrentPolicy, manifest: Mapping[str, Any]) -> None:
    """Freeze what was frozen when the bundle was written, and nothing else; bundles of before say nothing of it."""
    frozen = manifest.get("frozen")
    if frozen is None:
        return
    parameters = dict(policy.named_parameters())
    unknown = [name for name in frozen if name not in parameters]
    if unknown:
        raise StateError(f"It calls {', '.join(map(repr, unknown[:3]))} frozen, which the networks do not have.")
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in frozen)


def class_name(kind: type[Any]) -> str | None:
    """Where a class of the user's own is defined; None for the package's. It is compared, never imported."""
    return None if kind is RecurrentPolicy else f"{kind.__module__}.{kind.__qualname__}"


def refuse_other_class(manifest: Mapping[str, Any], found: type[Any], given: type[Any] | None) -> None:
    """An agent of a user's own policy class is not an agent of ours, even where the weights fit."""
    name = manifest.get("policy_class")
    if given is None and name not in (None, class_name(found)):
        raise ConfigError(
            f"It was trained with the policy class {name}, which a bundle names and does not hold. "
            f'Load it with custom_objects={{"policy_class": {name.rpartition(".")[-1]}}}.'
        )
