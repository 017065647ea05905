"""Interval propagation: bounds on the action that hold for every perturbation in the cube, proven layer by layer.

The memory's own state is an interval too, so the bound holds when every observation since an episode's start was moved.
Intervals forget how quantities hang together and grow from step to step: they say something for small perturbations.
A ball of another norm lies inside the cube of the same radius, so its bound is valid, only wider than it need be.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tailguard.errors import ConfigError
from tailguard.policy import RecurrentPolicy, State
from tailguard.policy.action_heads import GaussianHead
from tailguard.policy.known import is_plain, replaced
from tailguard.policy.recurrent import GRU, LSTM, Memory, NoMemory
from tailguard.policy.trunk import Trunk

Floats = NDArray[np.floating[Any]]
MONOTONE = (nn.Tanh, nn.ReLU, nn.LeakyReLU, nn.ELU)
ROUNDING = 1e-6
"""Relative, added to every bound: the sums behind it are rounded too."""


class Interval(NamedTuple):
    """Every number between low and high, element by element."""

    low: Tensor
    high: Tensor

    def __mul__(self, other: Any) -> Interval:
        """All products of two intervals."""
        ends = torch.stack([a * b for a in self for b in other])
        return Interval(ends.amin(0), ends.amax(0))

    def __add__(self, other: Any) -> Interval:
        return Interval(self.low + other[0], self.high + other[1])

    def through(self, function: Any) -> Interval:
        """A function that never falls."""
        return Interval(function(self.low), function(self.high))

    def linear(self, weight: Tensor, bias: Tensor | None) -> Interval:
        """weight @ x + bias: the centre moves, the radius is multiplied by |weight|."""
        centre, radius = 0.5 * (self.low + self.high), 0.5 * (self.high - self.low)
        middle, reach = nn.functional.linear(centre, weight, bias), nn.functional.linear(radius, weight.abs())
        reach = reach + ROUNDING * (nn.functional.linear(centre.abs(), weight.abs()) + reach)
        return Interval(middle - reach, middle + reach)

    def kept(self, keep: Tensor) -> Interval:
        """Zero where `keep` (N, 1) is 0."""
        return Interval(self.low * keep, self.high * keep)


class MemoryInterval(NamedTuple):
    """Per layer: hidden state and cell (N, H)."""

    hidden: list[Interval]
    cell: list[Interval]


def known(state: State) -> MemoryInterval:
    """A memory that is known exactly."""
    hidden = [Interval(layer, layer) for layer in state.hidden]
    cells = [Interval(layer, layer) for layer in state.cell] if len(state.cell) else hidden  # a GRU has none
    return MemoryInterval(hidden, cells)


def remembered(memory: Memory, x: Interval, state: MemoryInterval) -> tuple[Interval, MemoryInterval]:
    """One step of a memory."""
    if isinstance(memory, NoMemory):
        return x, state
    if not isinstance(memory, LSTM | GRU):
        raise ConfigError(f"No interval is known through a {type(memory).__name__}.")
    hidden, cells = [], []
    step = lstm_step if isinstance(memory, LSTM) else gru_step
    for layer in range(memory.n_layers):
        x, cell = step(memory, layer, x, state)
        hidden.append(x)
        cells.append(cell)
    return x, MemoryInterval(hidden, cells)


def lstm_step(memory: Memory, layer: int, x: Interval, state: MemoryInterval) -> tuple[Interval, Interval]:
    """Gates in torch's order: input, forget, candidate, output."""
    before = state.hidden[layer].linear(memory.hidden_weight[layer], memory.bias[layer])  # type: ignore[index]
    gates = x.linear(memory.input_weight[layer], None) + before  # type: ignore[index]
    entry, forget, candidate, output = split(gates, 4)
    kept = forget.through(torch.sigmoid) * state.cell[layer]
    cell = kept + entry.through(torch.sigmoid) * candidate.through(torch.tanh)
    return output.through(torch.sigmoid) * cell.through(torch.tanh), cell


def gru_step(memory: Memory, layer: int, x: Interval, state: MemoryInterval) -> tuple[Interval, Interval]:
    """Gates in torch's order: reset, update, candidate. The new state lies between the candidate and the old one."""
    entry = x.linear(memory.input_weight[layer], memory.bias[layer])  # type: ignore[index]
    before = state.hidden[layer].linear(memory.hidden_weight[layer], None)  # type: ignore[index]
    (reset, update, candidate), (old_reset, old_update, old_candidate) = split(entry, 3), split(before, 3)
    forget = (reset + old_reset).through(torch.sigmoid)
    share = (update + old_update).through(torch.sigmoid)
    fresh = (candidate + forget * old_candidate).through(torch.tanh)
    old = state.hidden[layer]
    # (1 - z) n + z h is monotone in n and h, and linear in z: its extremes lie at the ends
    lows = [(1.0 - z) * fresh.low + z * old.low for z in share]
    highs = [(1.0 - z) * fresh.high + z * old.high for z in share]
    return Interval(torch.minimum(*lows), torch.maximum(*highs)), old


def split(gates: Interval, n: int) -> list[Interval]:
    return [Interval(low, high) for low, high in zip(gates.low.chunk(n, -1), gates.high.chunk(n, -1), strict=True)]


def has_bounds(policy: RecurrentPolicy) -> bool:
    """Whether intervals are known through every layer of the actor, and nothing else has a say in its actions."""
    actor, head = policy.actor, policy.action_head
    if not (is_plain(actor, Trunk) and is_plain(actor.layers, nn.Sequential) and is_plain(head, GaussianHead)):
        return False
    layers = [*actor.layers, *head.children()]
    plain = all(any(is_plain(module, kind) for kind in (nn.Linear, *MONOTONE)) for module in layers)
    remembers = any(is_plain(actor.memory, kind) for kind in (LSTM, GRU, NoMemory))
    return plain and remembers and not replaced(policy, RecurrentPolicy, ("action_parameters", "action_step"))


def layered(layers: nn.Sequential, x: Interval) -> Interval:
    """Linear layers and activations that never fall."""
    for module in layers:
        if isinstance(module, nn.Linear):
            x = x.linear(module.weight, module.bias)
        elif isinstance(module, MONOTONE):
            x = x.through(module)
        else:
            raise ConfigError(
                f"No interval is known through {type(module).__name__}, which is not monotone. Policies with "
                "activation_fn tanh, relu, leaky_relu or elu have proven bounds."
            )
    return x


class Lies(NamedTuple):
    """What N agents would see step by step, and how far it may be moved."""

    observations: list[Tensor]  # (N, F) per step, the truth
    starts: list[NDArray[np.bool_]]  # (N,) per step, an episode begins here
    radius: Tensor  # (F,)
    always: bool = True  # every observation since the episode's start may be moved, not only the present one


@torch.no_grad()
def action_bounds(policy: RecurrentPolicy, lies: Lies) -> list[Interval]:
    """Per step: bounds (N, A) of the action, in units of the action space."""
    head = policy.action_head
    if not isinstance(head, GaussianHead):
        raise ConfigError("A bound on the change of the action needs continuous actions (a Box).")
    memory, found = policy.actor.memory, []
    actual = policy.initial_state(len(lies.observations[0]))
    state = known(actual)
    for seen, start in zip(lies.observations, lies.starts, strict=True):
        keep = torch.from_numpy(~start).float().unsqueeze(-1)
        state = MemoryInterval([part.kept(keep) for part in state.hidden], [part.kept(keep) for part in state.cell])
        actual = actual.keep(keep[:, 0])
        features, after = remembered(memory, Interval(seen - lies.radius, seen + lies.radius), state)
        actual = memory.step(seen, actual)[1]
        state = after if lies.always else known(actual)  # what an agent remembers of the truth is known exactly
        mean = layered(policy.actor.layers, features).linear(head.mean.weight, head.mean.bias)
        found.append(
            Interval(*(torch.from_numpy(head.to_env(end.numpy(force=True)).reshape(len(seen), -1)) for end in mean))
        )
    return found


def action_change_bound(policy: RecurrentPolicy, lies: Lies) -> tuple[Floats, float]:
    """(S, N) the furthest that any action can be from the unharmed one, and the width of the action space."""
    exact = action_bounds(policy, lies._replace(radius=torch.zeros_like(lies.radius), always=False))
    bounds = action_bounds(policy, lies)
    furthest = [
        torch.maximum(wide.high - true.low, true.high - wide.low).amax(-1).numpy()
        for wide, true in zip(bounds, exact, strict=True)
    ]
    space: Any = policy.action_space
    return np.stack(furthest), float(np.max(space.high - space.low))
