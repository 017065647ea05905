"""What the native core may do in the place of torch: the work of modules that are exactly what they were written for.

A subclass, a module in another's place, a hook, or a method that was put on one object: torch does all of it, and
calls every module as a module, so that acting, training, evaluation and `predict` apply the same function.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from tailguard.errors import ConfigError

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
NEVER_CALLED = (nn.ModuleList, nn.ParameterList, nn.ModuleDict, nn.ParameterDict)


def is_plain(module: Any, kind: type[nn.Module]) -> bool:
    """Whether a module is of exactly this kind, and neither a hook nor a method of its own says otherwise."""
    return type(module) is kind and not is_hooked(module) and not own_methods(module)


def is_hooked(module: nn.Module) -> bool:
    """Whether calling the module calls something else too."""
    everywhere = _has_any_global_hook()  # type: ignore[no-untyped-call]
    return any(getattr(module, hooks) for hooks in HOOKS) or bool(everywhere)


def own_methods(module: nn.Module) -> list[str]:
    """Methods of its class that were replaced on this object alone."""
    kind: Any = type(module)
    return sorted(methods_of(kind) & vars(module).keys())


@cache
def methods_of(kind: type[Any]) -> frozenset[str]:
    """Names of what can be called on a class."""
    return frozenset(name for name in dir(kind) if callable(getattr(kind, name, None)))


def is_chain(layers: nn.Module, activation: type[nn.Module], width: int, last: nn.Module) -> bool:
    """Whether these are plain linear layers, each with this activation, from features of `width` up to `last`."""
    if not (is_plain(layers, nn.Sequential) and is_plain(last, nn.Linear)):
        return False
    inner = list(layers)  # type: ignore[call-overload]
    linear = [*inner[::2], last]
    plain = all(is_plain(layer, nn.Linear) for layer in linear)
    if len(inner) % 2 or not plain or not all(is_plain(layer, activation) for layer in inner[1::2]):
        return False
    widths = [width, *(layer.out_features for layer in linear)]
    return all(is_usable(layer, n_in) for layer, n_in in zip(linear, widths, strict=False))


def is_usable(layer: nn.Linear, in_features: int) -> bool:
    """Whether the native core can read a linear layer's numbers: float32 on the CPU, with a bias."""
    parts = (layer.weight, layer.bias)
    return layer.in_features == in_features and all(
        type(part) is nn.Parameter and part.device.type == "cpu" and part.dtype == torch.float32 for part in parts
    )


def replaced(module: nn.Module, base: type[nn.Module], names: Iterable[str]) -> list[str]:
    """Those of the base's methods that a subclass or this object has replaced."""
    own = own_methods(module)
    return [name for name in names if name in own or getattr(type(module), name) is not getattr(base, name)]


def refuse_hooks_never_called(root: nn.Module, never_called: Sequence[type[nn.Module]]) -> None:
    """A hook on a module whose own `forward` nobody calls would be silent."""
    for name, module in root.named_modules():
        hooked = any(getattr(module, hooks) for hooks in HOOKS)
        children = [child for child, _ in module.named_children()]
        if hooked and isinstance(module, (*never_called, *NEVER_CALLED)):
            inside = ", ".join(children)
            raise ConfigError(
                f"{name or 'The policy'} has a hook that would never be called: its own forward is not used. Hook the "
                f"modules inside it instead ({inside})."
            )
