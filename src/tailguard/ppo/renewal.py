"""A learner for networks in which a module or a parameter was replaced: what was there goes on learning."""

from __future__ import annotations

import torch
from torch import Tensor

from tailguard.ppo.learner import Learner


def renewed(learner: Learner, noise: torch.Generator) -> Learner:
    """The learner itself while it holds all of its policy's parameters; otherwise a new one that does.

    Parameters that are still there keep what the optimizer remembers of them; new ones begin with nothing. The
    scaler's statistics stay where all tensors have the sizes they had, and start anew, with a warning, where not.
    """
    policy, before = learner.policy, learner.vector
    if before.holds(policy):
        return learner
    places = {id(parameter): before.where(parameter) for parameter in before.parameters}
    after = Learner(policy, learner.config, noise, learner.adversary)
    remembered = learner.optimizer.state.get(before.flat, {})
    if remembered:
        after.optimizer.load_state_dict(moved_state(learner.optimizer.state_dict(), before.flat, after, places))
    scaler = learner.gradient_scaler
    if scaler.config.enabled or after.vector.sizes == before.sizes:  # what only measures starts anew without a word
        after.gradient_scaler.load_state_dict(scaler.state_dict())
    after.skipped.load_state_dict(learner.skipped.state_dict())
    after.batch_sequences, after.micro_sequences = learner.batch_sequences, learner.micro_sequences
    policy.optimizer = after.optimizer
    return after


def moved_state(state: dict, flat: Tensor, after: Learner, places: dict[int, slice]) -> dict:  # type: ignore[type-arg]
    """An optimizer's state with every number where its parameter lies now."""

    def moved(value: object) -> object:
        if not isinstance(value, Tensor) or value.shape != flat.shape:
            return value
        whole = value.new_zeros(after.vector.flat.shape)
        for parameter in after.vector.parameters:
            if id(parameter) in places:
                whole[after.vector.where(parameter)] = value[places[id(parameter)]]
        return whole

    kept = {name: moved(value) for name, value in state["state"][0].items()}
    return {**state, "state": {0: kept}}
