"""What must hold of saved state before an agent takes it: the shapes and types of its own, and numbers that can be.

An agent is compared with itself: the networks its configuration builds, and one step of the optimizer it names, say
which tensors there are. So nothing has to be listed here for a new kind of network or optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.optim import Optimizer

from tailguard.errors import (
    CheckpointError,
    ConfigError,
    EnvContractError,
    StateError,
    TailguardError,
    TrainingDivergedError,
)
from tailguard.files import physical_memory
from tailguard.optim import VarianceGradientScaler
from tailguard.policy import PolicyConfig, RecurrentPolicy
from tailguard.ppo.config import PPOConfig
from tailguard.ppo.learner import after_a_step
from tailguard.stateful import Stateful

NOT_NEGATIVE = {
    *("step", "exp_avg_sq", "max_exp_avg_sq", "sec_moment"),  # optimizers
    *("step_count", "counts", "power", "signal"),  # noise of gradients
    *("count", "m2", "var", "std", "epsilon", "clip_obs"),  # scales
    *("beta", "decay_done", "dual", "fresh", "total", "in_a_row"),  # controllers and counters
}
"""Names of numbers that are sums of squares, counts or weights."""
MAY_BE_INFINITE = {"clip_obs"}
REPORTS = {"alerts", "episodes"}
"""Parts that only tell what was: no step depends on their numbers."""


class DescribesNetworks(Protocol):
    """What the size of an agent's networks follows from."""

    policy_config: PolicyConfig
    config: PPOConfig
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]


COPIES = 6  # of a network in training: weights, gradients, moments, noise


def shapes_of(build: Callable[[], nn.Module]) -> dict[str, Tensor]:
    """The state of networks as shapes and types, without their memory."""
    with torch.device("meta"):
        return build().state_dict()


def refuse_networks_beyond_memory(build: Callable[[], RecurrentPolicy], agent: DescribesNetworks) -> None:
    """Networks that cannot fit are refused before the first of their tensors is made."""
    policy, config = agent.policy_config, agent.config
    arch, features = policy.net_arch, int(np.prod(agent.observation_space.shape or (1,)))
    widths = [policy.lstm_hidden_size, *arch.pi, *arch.vf, config.critic.n_quantiles, config.critic.n_atoms]
    widest = max(*widths, config.risk.value_units, features, action_outputs(agent.action_space))
    n_matrices = 3 * (8 * policy.n_lstm_layers + len(arch.pi) + len(arch.vf) + 4)
    there = physical_memory()
    if 4 * COPIES * n_matrices * widest**2 < there:
        return  # however they are joined
    try:
        n_numbers = sum(tensor.numel() for tensor in shapes_of(build).values())
    except RuntimeError:  # torch cannot even say how large they are
        n_numbers = widest**2
    if 4 * COPIES * n_numbers > there:
        raise ConfigError(
            f"These networks need about {4 * COPIES * n_numbers / 2**30:,.0f} GiB in training, this machine has "
            f"{there / 2**30:,.0f}; their largest width is {widest}. Lower lstm_hidden_size={policy.lstm_hidden_size}, "
            f"n_lstm_layers={policy.n_lstm_layers}, net_arch or n_quantiles, or make the environment's spaces smaller."
        )


def action_outputs(space: spaces.Space[Any]) -> int:
    """Outputs that actions of a space need, at most."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return int(space.nvec.size) * int(space.nvec.max())
    return int(np.prod(space.shape or (1,)))


def refuse_misfit(described: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
    """Compare networks with the tensors that a bundle holds for them."""
    for name in sorted({*described, *saved}):
        there, here = described.get(name), saved.get(name)
        if there is None or not isinstance(here, Tensor):
            what = "is not a tensor of these networks" if there is None else "is missing"
            raise CheckpointError(
                f"{name} {what}: the saved weights are of another configuration, or of networks with modules of a "
                'user\'s own. Those are loaded with custom_objects={"policy_class": ...}: a subclass of '
                "RecurrentPolicy that builds them."
            )
        if there.shape != here.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(here.shape)}, the configuration describes {tuple(there.shape)}."
            )


def refuse_unsound(states: Mapping[str, Any], parts: Mapping[str, Stateful], config: PPOConfig) -> None:
    """Refuse state with numbers that no training can arrive at, or of other types or shapes than the parts' own."""
    for name, state in states.items():
        part = parts[name]
        if isinstance(part, Optimizer):
            problems = unlike_steps(state, part, config, name)
        elif isinstance(part, VarianceGradientScaler):
            problems = iter(())  # it forgets, with a warning, what was measured in another way
        else:
            problems = unlike(state, part.state_dict(), name)
        for problem in chain(problems, unsound(state, name)):
            raise StateError(f"{problem}. This state is damaged or of another agent; nothing of it was taken.")


def refuse_to_write_unsound(states: Mapping[str, Any]) -> None:
    """What could not be loaded again is not written."""
    for name, state in states.items():
        for problem in unsound(state, name):
            raise TrainingDivergedError(
                f"The agent is not saved: {problem}. What was saved before is untouched: go on from there, with a "
                "lower learning rate or smaller rewards."
            )


def unsound(state: Any, path: str) -> Iterator[str]:
    """Numbers that are not finite, or are negative where they cannot be."""
    if path in REPORTS:
        return
    for place, value in leaves(state, path):
        name = place.rpartition("/")[-1]
        numbers = torch.as_tensor(value) if isinstance(value, Tensor | np.ndarray | float) else None
        if numbers is not None and numbers.dtype.is_complex:
            yield f"{place} is {numbers.dtype}, where real numbers are kept"
        elif numbers is not None and numbers.is_floating_point():
            bad = numbers.isnan() if name in MAY_BE_INFINITE else ~numbers.isfinite()
            if bool(bad.any()):
                yield f"{place} holds {float(numbers[bad].flatten()[0])}, which is not finite"
        if name in NOT_NEGATIVE and is_below_zero(value if numbers is None else numbers):
            yield f"{place} holds a number below zero, where none can be"
        if place.endswith("snapshot/1") and isinstance(value, float | int) and value <= 0:
            yield f"{place} is {value}: a scale is above zero"


def is_below_zero(value: Any) -> bool:
    """Whether a number is, or any of a tensor's."""
    if isinstance(value, Tensor):
        return not value.is_complex() and bool((value < 0).any())
    return isinstance(value, int) and value < 0


def leaves(state: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Everything in a tree that holds nothing else, under its path."""
    if isinstance(state, Mapping | list | tuple):
        for name, value in state.items() if isinstance(state, Mapping) else enumerate(state):
            yield from leaves(value, f"{path}/{name}")
    else:
        yield path, state


def unlike(state: Any, own: Any, path: str) -> Iterator[str]:
    """Where saved state has another type or shape than a part's own, as far as both have the same names."""
    if isinstance(own, Mapping):
        if not isinstance(state, Mapping):
            yield f"{path} is a {type(state).__name__}, expected named state"
            return
        for name in own:
            if name in state:
                yield from unlike(state[name], own[name], f"{path}/{name}")
    elif isinstance(own, Tensor):
        if not isinstance(state, Tensor) or state.dtype != own.dtype or state.shape != own.shape:
            yield f"{path} is {described(state)}, expected {described(own)}"
    elif isinstance(own, np.ndarray):  # such as of so many episodes: it may have another length
        if not isinstance(state, np.ndarray) or state.dtype != own.dtype:
            yield f"{path} is {described(state)}, expected {described(own)}"
    elif isinstance(own, bool | int | float) and state is not None and not isinstance(state, int | float):
        yield f"{path} is {described(state)}, expected a number"


def unlike_steps(state: Any, optimizer: Optimizer, config: PPOConfig, path: str) -> Iterator[str]:
    """Where an optimizer's saved state differs from what it keeps of a parameter once it has taken a step."""
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        yield f"{path} is not the state of an optimizer"
        return
    shapes = [parameter.shape for group in optimizer.param_groups for parameter in group["params"]]
    expected: Mapping[str, Any] = after_a_step(config) if state["state"] else {}
    for index, kept in state["state"].items():
        place = f"{path}/state/{index}"
        if index not in range(len(shapes)) or not isinstance(kept, Mapping) or set(kept) != set(expected):
            names = sorted(map(str, kept)) if isinstance(kept, Mapping) else described(kept)
            yield f"{place} holds {names}, expected {sorted(expected)} of parameters 0 to {len(shapes) - 1}"
            continue
        for name, own in expected.items():
            like = own.new_empty(shapes[index]) if isinstance(own, Tensor) and own.ndim else own
            yield from unlike(kept[name], like, f"{place}/{name}")


def described(value: Any) -> str:
    """Type and shape of a value, in words."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


@contextmanager
def unchanged_on_error(parts: Callable[[], Mapping[str, Stateful]]) -> Iterator[None]:
    """Put every part back as it was when copying fails. `parts` is asked again: one may have been replaced."""
    before = {name: deepcopy(dict(part.state_dict())) for name, part in parts().items()}
    try:
        yield
    except BaseException:
        for name, part in parts().items():
            part.load_state_dict(before[name])
        raise


@contextmanager
def refusing(path: Any, what: str, kind: type[TailguardError] = CheckpointError) -> Iterator[None]:
    """A bundle is foreign data: whatever goes wrong while reading it is said as one error that names it."""
    try:
        yield
    except TailguardError as error:
        if isinstance(error, EnvContractError) or str(path) in str(error):
            raise
        raise kind(f"{path} does not describe {what} of this package: {error}") from error
    except (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError) as error:
        raise kind(f"{path} does not describe {what} of this package: {error!r}.") from error
    except (RecursionError, RuntimeError, TypeError, ValueError) as error:
        said = str(error).splitlines()[0] if str(error) else repr(error)
        raise kind(f"{path} does not describe {what} of this package: {said}") from error
