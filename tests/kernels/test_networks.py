"""The native kernels of the networks against their references, over random shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tailguard import kernels
from tailguard.kernels.jobs import ActorJob, CriticJob
from tailguard.kernels.layout import TrunkLayout
from tailguard.kernels.networks import (
    Trunk,
    evaluate,
    gradients,
    quantile_huber,
    trunk_forward,
)
from tailguard.kernels.reference import networks as reference

Rng = np.random.Generator

pytestmark = pytest.mark.skipif(kernels.native() is None, reason=kernels.status())


def random_layout(
    rng: Rng, n_outputs: int, at: int = 0, n_inputs: int | None = None, recurrent: bool = True
) -> tuple[TrunkLayout, int]:
    """A layout with its parts in random order and gaps between them, and where it ends."""
    n_inputs = n_inputs or int(rng.integers(1, 20))
    layers, units = (int(rng.integers(0, 4)), int(rng.integers(1, 40))) if recurrent else (0, 0)
    units = units if layers else 0
    widths = [*rng.integers(1, 40, size=rng.integers(0, 3)).tolist(), n_outputs]
    sizes = [[(4 * units, n_inputs if k == 0 else units), (4 * units, units), (4 * units,)] for k in range(layers)]
    inputs = units or n_inputs
    for width in widths:
        sizes.append([(width, inputs), (width,)])
        inputs = width
    flat = [shape for group in sizes for shape in group]
    offsets = [0] * len(flat)
    for i in rng.permutation(len(flat)):
        offsets[i] = at
        at += int(np.prod(flat[i])) + int(rng.integers(0, 3))
    rows = iter(zip(offsets, flat, strict=True))
    parts = [tuple(next(rows)[0] for _ in range(3)) for _ in range(layers)]
    dense = []
    for _ in widths:
        (weight, shape), (bias, _) = next(rows), next(rows)
        dense.append((weight, bias, *shape))
    layout = TrunkLayout(n_inputs, units, tuple(parts), tuple(dense), str(rng.choice(["tanh", "relu"])))  # type: ignore[arg-type]
    return layout, at


def random_weights(rng: Rng, n: int) -> Any:
    return (rng.normal(size=n) * 0.3).astype(np.float32)


def random_sequences(rng: Rng, layout: TrunkLayout, n_steps: int, n: int) -> tuple[Any, ...]:
    """Inputs, starts, hidden states and cells."""
    x = rng.normal(size=(n_steps, n, layout.n_inputs)).astype(np.float32)
    states = (rng.normal(size=(len(layout.recurrent), n, layout.n_units)).astype(np.float32) for _ in range(2))
    return x, rng.uniform(size=(n_steps, n)) < 0.15, *states


def assert_close(found: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    """Relative in the norm of the whole array."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    assert np.isfinite(found).all()
    assert np.linalg.norm(found - wanted) <= tolerance * (np.linalg.norm(wanted) + 1e-12)


def exact(*arrays: Any) -> list[torch.Tensor]:
    """In double precision."""
    return [torch.from_numpy(a).double() if a.dtype == np.float32 else torch.from_numpy(a) for a in arrays]


@pytest.mark.parametrize("seed", range(30))
def test_steps_and_whole_rollouts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_envs, n_steps, length = int(rng.integers(1, 90)), int(rng.integers(1, 40)), int(rng.integers(1, 20))
    trunks, inputs, wanted, starts = [], [], [], rng.uniform(size=(n_steps, n_envs)) < 0.15
    for n_outputs in rng.integers(1, 40, size=2):
        layout, end = random_layout(rng, int(n_outputs))
        weights = random_weights(rng, end)
        x, _, hidden, cell = random_sequences(rng, layout, n_steps, n_envs)
        trunk = Trunk(layout)
        trunk.load(weights)
        trunks.append(trunk)
        inputs.append((x, hidden, cell))
        results = reference.trunk_forward(layout, *exact(weights, x, starts, hidden, cell))
        wanted.append([part.numpy() for part in results])

    for trunk, (x, hidden, cell), (output, _, hiddens, cells) in zip(trunks, inputs, wanted, strict=True):
        hidden, cell, found = hidden.copy(), cell.copy(), np.empty(output.shape[1:], np.float32)
        for t in range(n_steps):
            hidden[:, starts[t]] = cell[:, starts[t]] = 0.0
            trunk.step(x[t], hidden, cell, found)
            assert_close(found, output[t])
        assert_close(hidden, hiddens[-1])
        assert_close(cell, cells[-1])

    where = np.stack([rng.integers(0, n_steps, 9), rng.integers(0, n_envs, 9)], 1)
    found: dict[int, Any] = {}
    for n_threads in (1, 2, 3):
        copies = [(x, hidden.copy(), cell.copy()) for x, hidden, cell in inputs]
        columns = list(zip(*copies, strict=True))
        runs = evaluate(trunks, columns[0], starts, *columns[1:], length, where, n_threads, (True, False))
        found[n_threads] = [*[part for run in runs for part in run if part is not None], *columns[1], *columns[2]]
        firsts = [states for _, *states in inputs]
        for run, (_, hidden, cell), first, truth in zip(runs, copies, firsts, wanted, strict=True):
            output, features, hiddens, cells = truth
            assert_close(run.output, output)
            if run.features is not None:
                assert_close(run.features, features)
            assert_close(hidden, hiddens[-1])
            assert_close(cell, cells[-1])
            assert_close(run.after_hidden, hiddens[where[:, 0], :, where[:, 1]].swapaxes(0, 1))
            assert_close(run.after_cell, cells[where[:, 0], :, where[:, 1]].swapaxes(0, 1))
            for s, (h, c) in enumerate(zip(run.before_hidden, run.before_cell, strict=True)):
                kept = ~starts[s * length, :, None]
                assert_close(h, (hiddens[s * length - 1] if s else first[0]) * kept)
                assert_close(c, (cells[s * length - 1] if s else first[1]) * kept)
    for n_threads in (2, 3):
        for one, more in zip(found[1], found[n_threads], strict=True):
            np.testing.assert_array_equal(one, more)


@pytest.mark.parametrize("seed", range(40))
def test_quantile_huber(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_rows, n_quantiles, n_samples = int(rng.integers(0, 600)), int(rng.integers(1, 202)), int(rng.integers(1, 40))
    quantiles = rng.normal(size=(n_rows, n_quantiles)).astype(np.float32)
    samples = rng.normal(size=(n_rows, n_samples)).astype(np.float32)
    levels = np.sort(rng.uniform(0.01, 0.99, n_quantiles)).astype(np.float32)
    kappa = float(rng.choice([0.0, 0.1, 1.0, 5.0]))
    loss, gradient = quantile_huber(quantiles, samples, levels, kappa)
    predicted = torch.from_numpy(quantiles).double().requires_grad_()
    wanted = reference.quantile_huber_loss(predicted, *exact(samples, levels), kappa)
    (slope,) = torch.autograd.grad(wanted.sum(), predicted)
    assert_close(loss, wanted.detach())
    assert_close(gradient, slope)
    for n_threads in (2, 3):
        again = quantile_huber(quantiles, samples, levels, kappa, n_threads)
        np.testing.assert_array_equal(again[0], loss)
        np.testing.assert_array_equal(again[1], gradient)


def random_job(rng: Rng, kind: str) -> tuple[Any, Any]:
    """A job over some sequences, and the chosen ones."""
    n_steps, n = int(rng.integers(1, 24)), int(rng.integers(1, 150 if rng.uniform() < 0.3 else 20))
    n_actions, n_samples, n_choices = int(rng.integers(1, 4)), int(rng.integers(1, 33)), ()
    n_outputs = int(rng.integers(1, 202 if rng.uniform() < 0.2 else 40)) if kind in ("critic", "risk") else n_actions
    if kind == "categorical":
        n_choices = tuple(int(c) for c in rng.integers(1, 6, n_actions))
        n_outputs = sum(n_choices)
    layout, end = random_layout(rng, n_outputs)
    x, starts, hidden, cell = random_sequences(rng, layout, n_steps, n)
    valid = rng.uniform(size=(n_steps, n)) < rng.choice([0.0, 0.7, 1.0], p=[0.1, 0.6, 0.3])
    chosen = rng.permutation(n)[: rng.integers(0, n + 1)].astype(np.int64)
    scale = float(rng.uniform(0.1, 2.0))
    if kind in ("critic", "risk"):
        target = rng.normal(size=(n_steps, n, n_samples)).astype(np.float32)
        levels = np.sort(rng.uniform(0.01, 0.99, n_outputs)).astype(np.float32)
        more: dict[str, Any] = {}
        if kind == "risk":
            own = bool(rng.uniform() < 0.5)
            observed = rng.normal(size=(n_steps, n, 3)).astype(np.float32) if own else None
            n_inputs = layout.n_features + (3 if own else layout.n_inputs) + 2
            risk_layout, end = random_layout(rng, 1, end, n_inputs, recurrent=False)
            risk = rng.normal(size=(n_steps, n, 3)).astype(np.float32)
            more = {"risk_layout": risk_layout, "risk": risk, "risk_observations": observed}
        weights = random_weights(rng, end)
        inputs = layout, weights, np.full_like(weights, 7.0), x, starts, hidden, cell, valid
        kappa = float(rng.choice([0.0, 1.0]))
        return CriticJob(*inputs, target, levels, kappa, **more, scale=scale), chosen
    log_std_at = -1 if n_choices else end
    weights = random_weights(rng, end if n_choices else end + n_actions)
    inputs = layout, weights, np.full_like(weights, 7.0), x, starts, hidden, cell, valid
    actions = rng.normal(size=(n_steps, n, n_actions)).astype(np.float32)
    if n_choices:
        actions = np.stack([rng.integers(0, c, (n_steps, n)) for c in n_choices], -1).astype(np.float32)
    log_probs = np.zeros((n_steps, n), np.float32)
    advantages = rng.normal(size=(n_steps, n)).astype(np.float32)
    job = ActorJob(*inputs, actions, log_probs, advantages, log_std_at, n_choices, scale=scale)
    act_likely(rng, job)
    job.clip_range, job.ent_coef, job.kl_beta = 0.2, float(rng.uniform(0, 0.1)), float(rng.uniform(0, 0.5))
    return job, chosen


def act_likely(rng: Rng, job: ActorJob) -> None:
    """Set actions of a Gaussian as the policy takes them, and log-probabilities (L, S) near its own, so that ratios lie
    on both sides of the bounds."""
    inputs = exact(job.weights, job.observations, job.starts, job.hidden, job.cell)
    output = reference.trunk_forward(job.layout, *inputs)[0]
    if job.log_std_at >= 0:
        std = inputs[0][job.log_std_at : job.log_std_at + job.actions.shape[2]].exp()
        job.actions = (output.numpy() + rng.normal(size=job.actions.shape) * std.numpy()).astype(np.float32)
        log_prob = torch.distributions.Normal(output, std).log_prob(*exact(job.actions)).sum(-1)
    else:
        actions = torch.from_numpy(job.actions).long()
        parts = enumerate(torch.split(output, list(job.n_choices), -1))
        chosen = [part.log_softmax(-1).gather(-1, actions[..., a : a + 1])[..., 0] for a, part in parts]
        log_prob = torch.stack(chosen).sum(0)
    job.log_probs = (log_prob.numpy() + rng.normal(size=log_prob.shape) * 0.3).astype(np.float32)


def spoil_what_is_not_valid(rng: Rng, job: Any) -> None:
    for name in ("observations", "actions", "log_probs", "advantages", "target", "risk", "risk_observations"):
        if getattr(job, name, None) is not None:
            array = getattr(job, name)
            array[~job.valid] = rng.choice([np.nan, np.inf, 1.0], size=array[~job.valid].shape)


@pytest.mark.parametrize("kind", ["gaussian", "categorical", "critic", "risk"])
@pytest.mark.parametrize("seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(20, 150))])
def test_gradients(kind: str, seed: int) -> None:
    rng = np.random.default_rng([seed, len(kind)])
    job, chosen = random_job(rng, kind)
    if seed % 2:
        spoil_what_is_not_valid(rng, job)
    (sums,) = gradients([job], chosen)
    found = job.gradient.copy()
    job.gradient[:] = 7.0
    wanted = reference.gradient(job, chosen, torch.float64)
    assert_close(found, job.gradient)
    np.testing.assert_allclose(sums, wanted, rtol=1e-5, atol=1e-6 * max(1, len(chosen)))
    for n_threads in (2, 3):
        assert gradients([job], chosen, n_threads) == [sums]
        np.testing.assert_array_equal(job.gradient, found)


@pytest.mark.parametrize("seed", range(30))
def test_differentiable_trunks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layout, end = random_layout(rng, int(rng.integers(1, 20)), at=int(rng.integers(0, 5)))
    n_steps, n = int(rng.integers(1, 20)), int(rng.integers(1, 150 if seed % 3 == 0 else 9))
    x, starts, hidden, cell = random_sequences(rng, layout, n_steps, n)
    weights = random_weights(rng, end)
    towards = [torch.from_numpy(rng.normal(size=(n_steps, n, w))) for w in (layout.n_outputs, layout.n_features)]
    use = rng.permutation([True, bool(rng.integers(0, 2))])

    def loss_of(results: Any) -> torch.Tensor:
        return sum(
            ((part.double() * d).sum() for part, d, used in zip(results, towards, use, strict=True) if used),
            torch.zeros((), dtype=torch.float64),
        )

    leaves = [part.requires_grad_() for part in exact(weights, x)]
    results = reference.trunk_forward(layout, *leaves, *exact(starts, hidden, cell))[:2]
    wanted = torch.autograd.grad(loss_of(results), leaves)
    flat, inputs = torch.from_numpy(weights).requires_grad_(), torch.from_numpy(x).requires_grad_()
    rest = [torch.from_numpy(part) for part in (starts, hidden, cell)]
    for n_threads in (1, 2):
        found = trunk_forward(layout, flat, inputs, *rest, n_threads=n_threads)
        for part, exactly in zip(found, results, strict=True):
            assert_close(part.detach(), exactly.detach())
        for part, exactly in zip(torch.autograd.grad(loss_of(found), (flat, inputs)), wanted, strict=True):
            assert_close(part, exactly, 2e-6)
    views = [flat.detach()[o : o + int(np.prod(s))].view(s).requires_grad_() for o, s in layout.parts()]
    loss_of(trunk_forward(layout, flat.detach(), torch.from_numpy(x), *rest, views)).backward()
    for view, (offset, shape) in zip(views, layout.parts(), strict=True):
        assert view.grad is not None
        assert_close(view.grad, wanted[0][offset : offset + int(np.prod(shape))].view(shape), 2e-5)
    (d_x,) = torch.autograd.grad(loss_of(trunk_forward(layout, flat.detach(), inputs, *rest)), inputs)
    assert_close(d_x, wanted[1], 2e-6)


def test_a_second_backward_pass_through_a_trunk_gives_the_same_gradient_and_leaves_the_first_alone() -> None:
    rng = np.random.default_rng(0)
    layout, end = random_layout(rng, 3)
    arrays = (random_weights(rng, end), *random_sequences(rng, layout, 5, 4))
    weights, x, *rest = (torch.from_numpy(part) for part in arrays)
    weights.requires_grad_(), x.requires_grad_()
    output = trunk_forward(layout, weights, x, *rest)[0]
    first = torch.autograd.grad(output.sum(), (weights, x), retain_graph=True)
    kept = [part.clone() for part in first]
    second = torch.autograd.grad(2.0 * output.sum(), (weights, x))
    for part, copy, twice in zip(first, kept, second, strict=True):
        assert torch.equal(part, copy)
        assert torch.equal(2.0 * part, twice)


def refused(job: Any, chosen: Any, **changes: Any) -> str:
    with pytest.raises(ValueError) as refusal:
        gradients([replace(job, **changes)], chosen)
    return str(refusal.value)


def test_arrays_that_do_not_fit_are_named() -> None:
    rng = np.random.default_rng(3)
    job, chosen = random_job(rng, "gaussian")
    n_steps, n = job.starts.shape
    assert refused(job, chosen, hidden=job.hidden[:, :0]).startswith("hidden has shape (")
    assert refused(job, chosen, weights=job.weights[:-1], gradient=job.gradient[:-1]).startswith("weights:")
    assert "float32" in refused(job, chosen, advantages=job.advantages.astype(np.float64))
    assert "contiguous" in refused(
        job, chosen, actions=np.zeros((n_steps, n, 2 * job.actions.shape[2]), "f4")[..., ::2]
    )
    assert "starts is missing" in refused(job, chosen, starts=None)
    assert f"sequence {n} of {n} does not exist" in refused(job, np.array([0, n]))
    assert "chosen" in refused(job, np.array([-1]))
    critic, chosen = random_job(rng, "risk")
    assert refused(critic, chosen, levels=critic.levels[:0]).startswith("levels has shape (0)")
    assert "risk_layout" in refused(critic, chosen, risk_layout=critic.layout)
    assert "risk is missing" in refused(critic, chosen, risk=None)
    with pytest.raises(ValueError, match="tanh or relu"):
        Trunk(job.layout._replace(activation="gelu"))
    with pytest.raises(ValueError, match="dense layer 0 reads"):
        Trunk(job.layout._replace(dense=((0, 0, 3, 99),)))
    trunk, state = Trunk(job.layout), np.zeros((len(job.layout.recurrent), 2, job.layout.n_units), np.float32)
    with pytest.raises(RuntimeError, match="load"):
        trunk.step(job.observations[0, [0, 0]], state, state, np.zeros((2, job.layout.n_outputs), np.float32))
