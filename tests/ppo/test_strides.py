"""Whole steps in compiled loops (optim/strides.py) against the same steps one by one, part by part: no bit differs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tailguard import DistributionalPPO
from tailguard.checkpoint import state_digest
from tailguard.errors import TrainingDivergedError
from tailguard.health import metrics
from tailguard.optim.strides import MOST_STEPS
from tailguard.rollout import SequenceBatch
from tailguard.rollout.sequences import Choice
from tests.agents import collected, tiny_agent
from tests.environments import pendulum

LARGE = {"lstm_hidden_size": 96, "net_arch": [32]}  # 130,000 weights: several chunks and shares


def agent_of(threads: int = 1, **settings: Any) -> DistributionalPPO:
    return collected(tiny_agent(update_threads=threads, **{"optimizer": "adaptive_upgd", **settings}))


def choices_of(batch: SequenceBatch, n_batches: int = 7) -> list[Choice]:
    """Batches of 2 to 5 sequences, drawn with a seed of their own."""
    rng = np.random.default_rng(0)
    return [Choice(batch, rng.permutation(batch.n_sequences)[: 2 + i % 4]) for i in range(n_batches)]


def state_of(agent: DistributionalPPO) -> str:
    """A digest of all that a step changes."""
    return state_digest({name: part.state_dict() for name, part in agent.parts().items()})


def both_ways(agent: DistributionalPPO, twin: DistributionalPPO, spoil: Any = lambda batch: batch) -> list[Any]:
    """Steps of the first in one, of the second one by one; returns what both say of each."""
    in_one = agent.learner.steps(choices_of(spoil(agent.sequences())), agent.knobs(), None)
    one_by_one = [twin.learner.step(choice, twin.knobs(), None) for choice in choices_of(spoil(twin.sequences()))]
    return list(zip(in_one, one_by_one, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"policy_kwargs": LARGE},
        {"optimizer": "upgdw", "optimizer_kwargs": {"weight_decay": 0.1, "protect": "noise"}},
        {"optimizer_kwargs": {"sigma": 0.0, "weight_decay": 0.01}},
        {"max_grad_norm": 1e-3},
        {"max_grad_norm": 1e9},
        {"vgs": {"warmup_steps": 2, "alpha": 10.0}},
        {"risk": {"mode": "episode", "weight": 0.3}},
        {"gradient_precision": "bfloat16", "critic": {"precision": "bfloat16"}},
    ],
    ids=str,
)
def test_steps_in_one_change_no_bit(settings: dict[str, Any], threads: int) -> None:
    agent, twin = agent_of(threads, **settings), agent_of(1, **settings)
    assert agent.learner.compiled.whole
    assert agent.learner.strides.most_steps == (1 if "vgs" in settings else MOST_STEPS)
    before = agent.learner.vector.flat.detach().clone()
    for mine, other in both_ways(agent, twin):
        assert mine == other
    assert not torch.equal(agent.learner.vector.flat, before)
    assert state_of(agent) == state_of(twin)
    assert agent.learner.figures() == twin.learner.figures()


def test_whole_trainings_agree_and_more_steps_than_fit_at_a_time_are_taken() -> None:
    def trained(in_one: bool) -> DistributionalPPO:
        agent = tiny_agent(pendulum(4, 0), optimizer="adaptive_upgd", batch_size=8, n_epochs=3, update_threads=2)
        if not in_one:
            agent.learner.optimizer.register_step_post_hook(lambda *_: None)  # somebody hangs on the step
        agent.learn(3 * 128)
        return agent

    agent, twin = trained(True), trained(False)
    assert twin.learner.strides.most_steps == 0
    assert agent.learner.gradient_scaler.step_count == 3 * 3 * 15
    assert 2 * MOST_STEPS < 3 * 15
    assert state_of(agent) == state_of(twin)


def spoiled(batch: SequenceBatch) -> SequenceBatch:
    """Advantages that are not finite in the sequences of the third batch."""
    advantages = batch.advantages.clone()
    advantages[:, choices_of(batch)[2].chosen] = float("nan")
    return replace(batch, advantages=advantages, readings={})


def test_steps_that_are_not_finite_change_nothing_and_the_others_are_taken_as_if_they_had_not_been() -> None:
    agent, twin = agent_of(2, max_skipped_steps=50), agent_of(1, max_skipped_steps=50)
    results = both_ways(agent, twin, spoiled)
    skips = [mine[metrics.SKIPPED_STEPS] for mine, _ in results]
    assert 0 < sum(skips) < len(skips)
    assert skips == [other[metrics.SKIPPED_STEPS] for _, other in results]
    assert torch.isfinite(agent.learner.vector.flat).all()
    assert agent.learner.skipped.total == twin.learner.skipped.total == sum(skips)
    assert state_of(agent) == state_of(twin)


def test_too_many_steps_in_a_row_that_are_not_finite_end_the_training_at_once() -> None:
    agent = agent_of(2, max_skipped_steps=3)
    batch = agent.sequences()
    nowhere = replace(batch, advantages=torch.full_like(batch.advantages, float("nan")), readings={})
    before = agent.learner.vector.flat.detach().clone()
    mixed = [*choices_of(nowhere, 3), *choices_of(nowhere, 3)]
    with pytest.raises(TrainingDivergedError, match="3 optimizer steps in a row had a loss"):
        list(agent.learner.steps(mixed, agent.knobs(), None))
    assert torch.equal(agent.learner.vector.flat, before)
    assert agent.learner.skipped.total == 3


def test_a_batch_without_a_valid_sample_takes_no_step_among_others_that_do() -> None:
    agent, twin = agent_of(), agent_of()

    def emptied(batch: SequenceBatch) -> SequenceBatch:
        valid = batch.valid.clone()
        valid[:, choices_of(batch)[3].chosen] = False
        return replace(batch, valid=valid, readings={})

    results = both_ways(agent, twin, emptied)
    assert [mine is None for mine, _ in results].count(True) >= 1
    for mine, other in results:
        assert mine == other
    assert state_of(agent) == state_of(twin)


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "adam"},
        {"optimizer": "upgd"},
        {"optimizer_kwargs": {"gate": "minmax"}},
        {"optimizer_kwargs": {"adaptive_noise": True}},
        {"optimizer_kwargs": {"fused": False}},
        {"vgs": {"statistic": "norm"}},
    ],
    ids=str,
)
def test_what_the_loops_do_not_know_goes_step_by_step(settings: dict[str, Any]) -> None:
    agent, twin = agent_of(**settings), agent_of(**settings)
    assert agent.learner.strides.most_steps == 0
    for mine, other in both_ways(agent, twin):
        assert mine == other
    assert state_of(agent) == state_of(twin)


def test_micro_batches_and_trunks_that_torch_differentiates_go_step_by_step() -> None:
    agent, twin = agent_of(), agent_of()
    now, choices = agent.knobs(), choices_of(agent.sequences())
    stepped = [twin.learner.step(choice, now, 2) for choice in choices_of(twin.sequences())]
    assert list(agent.learner.steps(choices, now, 2)) == stepped
    assert state_of(agent) == state_of(twin)
    agent.learner.compiled.forget()
    assert not agent.learner.compiled.whole
    before = agent.learner.vector.flat.detach().clone()
    for stats in agent.learner.steps(choices, now, None):
        assert stats is not None
        assert stats[metrics.SKIPPED_STEPS] == 0.0
    assert not torch.equal(agent.learner.vector.flat, before)
