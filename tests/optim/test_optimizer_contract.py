"""What any torch optimizer must do: groups, closure, schedulers, state that continues bit for bit, clear refusals."""

from __future__ import annotations

import copy
import io
import itertools
import json
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from tailguard.errors import ConfigError, StateError
from tailguard.optim import UPGD, UPGDW, AdaptiveUPGD, scaled_step
from tailguard.optim.undo import StepGuard

FAMILY = [UPGD, AdaptiveUPGD, UPGDW]
family = pytest.mark.parametrize("ours", FAMILY)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 17), nn.LayerNorm(17), nn.Tanh(), nn.Linear(17, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(16, 6, generator=source)
        optimizer.zero_grad(set_to_none=True)
        (model(x) - x[:, :2].sin()).square().mean().backward()
        optimizer.step()


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for one, other in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(one, other)


@family
def test_it_learns(ours):
    model = network()
    x = torch.randn(64, 6)
    target = x[:, :2].sin()
    before = error(model, x, target)
    train(model, ours(model.parameters(), lr=0.02), steps=300, seed=1)
    assert error(model, x, target) < 0.25 * before


@torch.no_grad()
def error(model: nn.Module, x: Tensor, target: Tensor) -> float:
    return float((model(x) - target).square().mean())


@family
@pytest.mark.parametrize("options", [{}, {"gate": "minmax", "protect": "noise", "adaptive_noise": True}], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_a_loaded_optimizer_continues_bit_for_bit(ours, options, fused):
    """Through files, as a checkpoint goes: tensors by torch, everything else by JSON."""
    model = network()
    optimizer = ours(model.parameters(), sigma=0.05, fused=fused, **options)
    train(model, optimizer, 7, seed=1)

    twin = copy.deepcopy(model)
    other = ours(twin.parameters(), sigma=0.05, fused=fused, generator=torch.Generator().manual_seed(99), **options)
    other.load_state_dict(through_files(optimizer.state_dict()))
    train(model, optimizer, 7, seed=2)
    train(twin, other, 7, seed=2)
    assert_same_weights(model, twin)


def through_files(state: dict[str, object]) -> dict[str, object]:
    """Refuses whatever is not tensor, number, string, list or dict, and turns keys into strings as JSON does."""
    tensors: list[Tensor] = []

    def pack(value: object) -> object:
        if isinstance(value, Tensor):
            tensors.append(value)
            return {"__tensor__": len(tensors) - 1}
        if isinstance(value, dict):
            return {key: pack(item) for key, item in value.items()}
        if isinstance(value, list):
            return [pack(item) for item in value]
        assert isinstance(value, bool | int | float | str), f"{value!r} cannot be stored"
        return value

    def unpack(value: object) -> object:
        if isinstance(value, dict) and "__tensor__" in value:
            return loaded[value["__tensor__"]]
        if isinstance(value, dict):
            return {key: unpack(item) for key, item in value.items()}
        return [unpack(item) for item in value] if isinstance(value, list) else value

    text, file = json.dumps(pack(state)), io.BytesIO()
    torch.save(tensors, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    return unpack(json.loads(text))


@family
def test_a_loaded_optimizer_shares_no_memory_with_its_source(ours):
    model = network()
    optimizer = ours(model.parameters())
    train(model, optimizer, 2, seed=1)
    twin = ours(copy.deepcopy(model).parameters())
    twin.load_state_dict(optimizer.state_dict())
    mine = {
        value.data_ptr() for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
    }
    theirs = {
        value.data_ptr() for state in twin.state.values() for value in state.values() if isinstance(value, Tensor)
    }
    assert not mine & theirs


@family
def test_a_deep_copy_continues_like_the_original(ours):
    model = network()
    optimizer = ours(model.parameters(), sigma=0.05, gate="minmax")
    train(model, optimizer, 3, seed=1)
    twin, other = copy.deepcopy((model, optimizer))
    train(model, optimizer, 3, seed=2)
    train(twin, other, 3, seed=2)
    assert_same_weights(model, twin)


@family
def test_same_seed_same_noise_and_the_global_stream_is_untouched(ours):
    runs = []
    for seed in (4, 4, 5):
        model = network()
        before = torch.get_rng_state()
        optimizer = ours(model.parameters(), sigma=0.1, generator=torch.Generator().manual_seed(seed))
        train(model, optimizer, 3, seed=1)
        assert torch.equal(torch.get_rng_state(), before)
        runs.append(torch.cat([param.detach().reshape(-1) for param in model.parameters()]))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@family
def test_schedulers_and_groups_set_the_rate(ours):
    model = network()
    body, head = list(model.parameters())[:-2], list(model.parameters())[-2:]
    optimizer = ours(body, lr=0.1)
    optimizer.add_param_group({"params": head, "lr": 0.0, "weight_decay": 0.0})
    scheduler = CosineAnnealingLR(optimizer, T_max=4)
    frozen = [param.clone() for param in head]
    for _ in range(4):
        train(model, optimizer, 1, seed=1)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)
    for param, start in zip(head, frozen, strict=True):
        assert torch.equal(param, start)


@family
def test_a_rate_halved_by_a_scheduler_halves_the_step(ours):
    moved = []
    for factor in (1.0, 0.5):
        w = nn.Parameter(torch.zeros(3))
        w.grad = torch.tensor([1.0, -2.0, 0.5])
        optimizer = ours([w], lr=0.1, sigma=0.1, generator=torch.Generator().manual_seed(0))
        LambdaLR(optimizer, lambda _, factor=factor: factor)
        optimizer.step()
        moved.append(w.detach().clone())
    torch.testing.assert_close(moved[1], moved[0] / 2)


@family
def test_a_group_added_later_starts_its_own_state_and_noise_continues(ours):
    model, extra = network(), nn.Linear(4, 4)
    optimizer = ours(model.parameters(), sigma=0.1)
    train(model, optimizer, 3, seed=1)
    optimizer.add_param_group({"params": list(extra.parameters())})
    extra(torch.randn(5, 4)).square().mean().backward()
    train(model, optimizer, 1, seed=2)
    assert optimizer.state[extra.weight] == {}  # zero_grad(set_to_none) of the training loop: no gradient, no state
    extra(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    assert optimizer.state[extra.weight]["step"] == 1


@family
def test_a_closure_is_called_with_gradients_on_and_its_loss_returned(ours):
    model = network()
    optimizer = ours(model.parameters())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 6)).square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0.0


@family
def test_parameters_without_gradient_are_skipped(ours):
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = ours([used, unused], sigma=0.1, weight_decay=0.1)
    noise = optimizer.noise.generator.get_state()
    optimizer.step()  # no gradient at all
    assert torch.equal(optimizer.noise.generator.get_state(), noise)
    used.grad = torch.ones(3)
    optimizer.step()
    assert torch.equal(unused.data, torch.ones(3))
    assert not torch.equal(used.data, torch.ones(3))
    assert unused not in optimizer.state or not optimizer.state[unused]


@family
def test_state_holds_the_documented_names(ours):
    w = nn.Parameter(torch.ones(3))
    w.grad = torch.ones(3)
    optimizer = ours([w])
    optimizer.step()
    expected = {"step", "avg_utility"} | ({"first_moment", "sec_moment"} if ours is not UPGD else set())
    assert set(optimizer.state[w]) == expected


@family
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_and_layouts_take_the_reference_path(ours, dtype):
    plain = nn.Parameter(torch.randn(4, 6, dtype=dtype))
    turned = nn.Parameter(torch.randn(6, 4, dtype=dtype).t())
    empty = nn.Parameter(torch.empty(0, dtype=dtype))
    mixed = nn.Parameter(torch.randn(5))
    for param in (plain, turned, empty, mixed):
        param.grad = torch.ones_like(param)
    before = [param.detach().clone() for param in (plain, turned, mixed)]
    ours([plain, turned, empty, mixed], lr=0.1, sigma=0.1).step()
    for param, start in zip((plain, turned, mixed), before, strict=True):
        assert torch.isfinite(param).all()
        assert not torch.equal(param, start)


@family
def test_a_step_is_seen_by_autograd(ours):
    """Stepping between forward and backward invalidates the graph, however the step is computed."""
    w = nn.Parameter(torch.ones(3))
    loss = (w * w).sum()
    w.grad = torch.ones(3)
    ours([w]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@family
@pytest.mark.parametrize(
    "bad",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"sigma": -0.1},
        {"sigma": float("inf")},
        {"weight_decay": float("nan")},
        {"beta_utility": 1.0},
        {"beta_utility": -0.1},
        {"lr": "fast"},
    ],
    ids=str,
)
def test_hyperparameters_that_cannot_be_meant_are_refused_by_name(ours, bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ours(network().parameters(), **bad)
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ours(network().parameters()).add_param_group({"params": [nn.Parameter(torch.ones(1))], **bad})


@pytest.mark.parametrize(
    "bad", [{"betas": (0.9, 1.0)}, {"betas": (0.9,)}, {"betas": (float("nan"), 0.9)}, {"eps": 0.0}]
)
def test_adam_options_that_cannot_be_meant_are_refused(bad):
    for ours in (AdaptiveUPGD, UPGDW):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            ours(network().parameters(), **bad)


@family
def test_unknown_modes_are_refused_with_a_suggestion(ours):
    with pytest.raises(ConfigError, match='Did you mean "minmax"'):
        ours(network().parameters(), gate="min_max")
    with pytest.raises(ConfigError, match="weights, noise"):
        ours(network().parameters(), protect="all")


@family
def test_no_parameters_sparse_gradients_and_integers_are_refused(ours):
    with pytest.raises(ConfigError, match="no parameters"):
        ours([])
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="sparse=False"):
        ours(table.parameters()).step()
    with pytest.raises(ConfigError, match="floating point"):
        ours([nn.Parameter(torch.ones(2, dtype=torch.complex64))])


def trained(ours: type, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = ours(model.parameters())
    train(model, optimizer, 1, seed=0)
    return optimizer


@pytest.mark.parametrize("writer, reader", list(itertools.permutations(FAMILY, 2)))
def test_the_state_of_another_optimizer_is_refused(writer, reader):
    model = network()
    with pytest.raises(StateError, match=writer.__name__):
        reader(model.parameters()).load_state_dict(trained(writer, model).state_dict())


@family
def test_states_of_another_shape_version_or_origin_are_refused(ours):
    model = network()
    state = trained(ours, model).state_dict()
    wide = nn.Sequential(nn.Linear(6, 18), nn.LayerNorm(18), nn.Tanh(), nn.Linear(18, 2))
    with pytest.raises(StateError, match="another network"):
        ours(wide.parameters()).load_state_dict(state)
    with pytest.raises(StateError, match="groups of"):
        ours(nn.Linear(6, 17).parameters()).load_state_dict(state)
    with pytest.raises(StateError, match="version 2"):
        ours(model.parameters()).load_state_dict({**state, "version": 2})
    with pytest.raises(StateError, match="version None"):
        ours(model.parameters()).load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
    with pytest.raises(StateError, match="missing"):
        ours(model.parameters()).load_state_dict({key: state[key] for key in state if key != "noise"})


@family
def test_a_refused_state_changes_nothing(ours):
    model = network()
    optimizer = trained(ours, model)
    before = copy.deepcopy(optimizer.state_dict())
    broken = copy.deepcopy(before)
    del broken["state"][3]["avg_utility"]
    with pytest.raises(StateError, match="avg_utility"):
        optimizer.load_state_dict(broken)
    after = optimizer.state_dict()
    assert torch.equal(after["state"][0]["avg_utility"], before["state"][0]["avg_utility"])
    assert torch.equal(after["noise"]["generator"], before["noise"]["generator"])


@family
def test_nothing_warns_in_a_plain_loop(ours):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(ours, network())


@family
def test_hooks_are_called_around_scaled_and_guarded_steps(ours):
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer, seen = ours([param]), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    scaled_step(optimizer, 1.0)
    assert StepGuard().step(optimizer)
    assert seen == ["pre", "post"] * 2


def test_a_step_of_ones_own_is_taken():
    class Counting(AdaptiveUPGD):
        steps = 0

        def step(self, closure=None):
            Counting.steps += 1
            return super().step(closure)

    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    scaled_step(Counting([param]), 1.0)
    assert Counting.steps == 1


def test_a_parameter_that_moved_in_memory_is_found():
    param = nn.Parameter(torch.ones(8))
    optimizer = AdaptiveUPGD([param], sigma=0.0, lr=0.1)
    for _ in range(2):
        param.grad = torch.ones(8)
        optimizer.step()
    param.data = torch.full((8,), 5.0)
    optimizer.state[param]["first_moment"] = torch.full((8,), -1.0)
    optimizer.step()
    assert (param.detach() > 5.0).all()


def test_a_parameter_cut_short_in_place_is_noticed():
    """It begins where the whole did, and what lies behind it is no longer its own."""
    param = nn.Parameter(torch.ones(8))
    optimizer = AdaptiveUPGD([param], sigma=0.0, lr=0.1)
    param.grad = torch.ones(8)
    optimizer.step()
    whole = param.data
    param.grad, param.data = None, whole[:4]
    for name in optimizer.buffers:
        optimizer.state[param][name] = optimizer.state[param][name][:4]
    param.grad, behind = torch.ones(4), whole[4:].clone()
    optimizer.step()
    assert torch.equal(whole[4:], behind)
    assert (whole[:4] < behind).all()
