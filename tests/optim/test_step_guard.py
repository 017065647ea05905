"""E4: a step after which weights or the optimizer's state would not be finite is left out without a trace."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD, scaled_step
from tailguard.optim.undo import StepGuard

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd with momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: Adam(params, lr=0.1, fused=True),
    "adamw with amsgrad": lambda params: AdamW(params, lr=0.1, amsgrad=True),
    "upgd": lambda params: UPGD(params, lr=0.1),
    "upgd in torch": lambda params: UPGD(params, lr=0.1, fused=False),
    "adaptive upgd": lambda params: AdaptiveUPGD(params, lr=0.1),
    "upgdw in torch": lambda params: UPGDW(params, lr=0.1, fused=False),
}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def parameters(seed: int = 0) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(size, generator=source)) for size in (7, 300)]
    for param in params:
        param.grad = torch.randn(param.shape, generator=source)
    return params


def everything(optimizer: Optimizer) -> list[torch.Tensor]:
    """Weights, state and the noise generator, as copies."""
    weights = [param for group in optimizer.param_groups for param in group["params"]]
    state = optimizer.state_dict()
    kept = [torch.as_tensor(value) for own in state["state"].values() for value in own.values()]
    noise = [state["noise"]["generator"]] if "noise" in state else []
    return [tensor.detach().clone() for tensor in (*weights, *kept, *noise)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


WAYS = [(name, "gradient") for name in OPTIMIZERS]
WAYS += [(name, "rate") for name in OPTIMIZERS if name not in ("sgd with momentum", "adamw with amsgrad")]
"""Torch itself refuses a rate of 1e39 with the other two."""


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("name, way", WAYS)
def test_a_step_beyond_float32_changes_nothing_and_the_next_one_is_taken(
    name: str, way: str, steps_before: int
) -> None:
    optimizer, guard = OPTIMIZERS[name](parameters()), StepGuard()
    for _ in range(steps_before):
        assert guard.step(optimizer)
    before, (group,) = everything(optimizer), optimizer.param_groups
    gradient = group["params"][1].grad.clone()
    if way == "gradient":
        group["params"][1].grad[5] = float("inf")
    else:
        group["lr"] = 1e39
    assert not guard.step(optimizer)
    assert_same(everything(optimizer), before)
    group["lr"], group["params"][1].grad = 0.1, gradient
    assert guard.step(optimizer)
    assert not torch.equal(everything(optimizer)[0], before[0])


@every_optimizer
def test_a_guarded_step_is_the_scaled_step(make: Callable[[list[nn.Parameter]], Optimizer]) -> None:
    torch.manual_seed(0)  # whatever draws its noise from it
    optimizer, guard = make(parameters()), StepGuard()
    torch.manual_seed(0)
    twin = make(parameters())
    for factor in (1.0, 0.5, 0.25):
        assert guard.step(optimizer, factor)
        scaled_step(twin, factor)
    assert_same(everything(optimizer), everything(twin))


@every_optimizer
def test_a_state_that_is_lost_is_noticed_also_where_weights_are_not(
    make: Callable[[list[nn.Parameter]], Optimizer],
) -> None:
    """A gradient whose square float32 cannot hold: Adam would divide by it for ever, and move nothing."""
    optimizer, guard = make(parameters()), StepGuard()
    guard.step(optimizer)
    keeps_squares = not isinstance(optimizer, SGD | UPGD)
    params = optimizer.param_groups[0]["params"]
    params[1].grad[5] = 1e21
    before = everything(optimizer)
    assert guard.step(optimizer) is not keeps_squares
    if keeps_squares:
        assert_same(everything(optimizer), before)


def test_a_guard_keeps_its_memory_and_follows_a_loaded_state() -> None:
    optimizer, guard = Adam(parameters(), lr=0.1, fused=True), StepGuard()
    for _ in range(2):
        guard.step(optimizer)
    memory = {tensor.data_ptr() for tensor in guard.copies.values()}
    guard.step(optimizer)
    assert {tensor.data_ptr() for tensor in guard.copies.values()} == memory
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = everything(optimizer)
    optimizer.param_groups[0]["lr"] = 1e39
    assert not guard.step(optimizer)
    assert_same(everything(optimizer), before)


def test_a_parameter_of_another_size_finds_room() -> None:
    """As the flat one has while some of its weights are frozen."""
    (param,), guard = parameters()[1:], StepGuard()
    optimizer = SGD([param], lr=0.1)
    assert guard.step(optimizer)
    param.grad = None
    param.data = param.data[:100].clone()
    param.grad = torch.full((100,), float("inf"))
    before = param.detach().clone()
    assert not guard.step(optimizer)
    assert torch.equal(param.detach(), before)


def test_the_family_steps_beyond_all_bounds_where_nobody_guards_it() -> None:
    """As every torch optimizer does."""
    optimizer = AdaptiveUPGD(parameters(), lr=0.1)
    assert StepGuard().step(optimizer)
    optimizer.param_groups[0]["lr"] = 1e39
    optimizer.step()
    assert not torch.isfinite(optimizer.param_groups[0]["params"][0]).all()
